"""Environments and tools for language models, in message space: no torch, no engine."""

from envs.data import TaskList, TaskSource, load_jsonl
from envs.env import Limits, Resources, ToolEnv
from envs.registration import EnvSpec, get, ids, register
from envs.rewards import Rubric
from envs.tools import Tool, ToolBug, ToolContext, ToolOutput, tool
from envs.types import Failure, Message, ModelTurn, Opening, Stop, Task, ToolCall, TurnResult

__all__ = [
    "EnvSpec",
    "Failure",
    "Limits",
    "Message",
    "ModelTurn",
    "Opening",
    "Resources",
    "Rubric",
    "Stop",
    "Task",
    "TaskList",
    "TaskSource",
    "Tool",
    "ToolBug",
    "ToolCall",
    "ToolContext",
    "ToolEnv",
    "ToolOutput",
    "TurnResult",
    "get",
    "ids",
    "load_jsonl",
    "register",
    "tool",
]
