"""Environments and tools for language models, in message space: no torch, no engine."""

from envs.data import Mixture, TaskList, TaskSource, load_jsonl, load_tasks
from envs.env import Limits, Resources, ToolEnv
from envs.registration import EnvSpec, get, ids, register, register_all
from envs.rewards import Episode, Rubric, Term
from envs.tools import Tool, ToolBug, ToolContext, ToolError, ToolOutput, tool
from envs.types import Failure, Message, ModelTurn, Opening, Stop, Task, ToolCall, TurnResult

__all__ = [
    "EnvSpec",
    "Episode",
    "Failure",
    "Limits",
    "Message",
    "Mixture",
    "ModelTurn",
    "Opening",
    "Resources",
    "Rubric",
    "Stop",
    "Task",
    "TaskList",
    "TaskSource",
    "Term",
    "Tool",
    "ToolBug",
    "ToolCall",
    "ToolContext",
    "ToolEnv",
    "ToolError",
    "ToolOutput",
    "TurnResult",
    "get",
    "ids",
    "load_jsonl",
    "load_tasks",
    "register",
    "register_all",
    "tool",
]

register_all()
