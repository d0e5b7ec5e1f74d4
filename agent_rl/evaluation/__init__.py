"""Evaluation that can be quoted: suites, episodes that survive a kill, estimators with intervals, comparisons.

Nothing here imports torch or an engine before a local model is evaluated.
"""
