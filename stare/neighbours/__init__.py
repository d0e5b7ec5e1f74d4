"""The methods around STARE, each one small function with its paper, chosen by name; torch alone."""

from stare.neighbours.advantages import Groups
from stare.neighbours.entry import Hook, Method, Status
from stare.neighbours.registry import METHODS, method, options_of
from stare.neighbours.token_weights import Tokens
from stare.neighbours.turns import Turns

__all__ = ["METHODS", "Groups", "Hook", "Method", "Status", "Tokens", "Turns", "method", "options_of"]
