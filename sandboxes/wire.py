"""A call and its result as JSON, the same for service and ``remote`` backend, and SandboxFusion's form of both."""

from __future__ import annotations

import base64
from dataclasses import asdict
from typing import Any

from pydantic import Base64Bytes, BaseModel, ConfigDict, Field

from sandboxes.base import ExecutionResult, Limits, SandboxFailure

MAX_TIMEOUT_S = 3600.0
MAX_BODY_BYTES = 128 * 1024 * 1024
TOKEN_VARIABLE = "AGENT_RL_SANDBOX_TOKEN"


class Call(BaseModel):
    """The body of a request to run a program; see ``Sandbox.exec`` for what its fields mean."""

    model_config = ConfigDict(extra="forbid")

    code: str
    id: str | None = Field(
        None, description="within a lease: the same again gets the same answer, without a second run"
    )
    language: str = "python"
    timeout_s: float | None = Field(None, gt=0, le=MAX_TIMEOUT_S)
    stdin: str | None = None
    files: dict[str, Base64Bytes] = {}
    session: str | None = None
    environment: dict[str, str] = {}
    fetch: list[str] = []
    cpu_s: float | None = Field(None, gt=0)
    memory_mb: int | None = Field(None, gt=0)
    open_files: int | None = Field(None, gt=0)
    output_bytes: int | None = Field(None, gt=0, le=MAX_BODY_BYTES // 8)
    stream: bool = Field(False, description="answer in lines of JSON: output as it comes, then the result")

    def arguments(self) -> dict[str, Any]:
        """Of ``Sandbox.exec``, beside ``code``."""
        names = ("language", "timeout_s", "stdin", "files", "session", "environment", "fetch")
        limits = Limits(
            cpu_s=self.cpu_s, memory_mb=self.memory_mb, open_files=self.open_files, output_bytes=self.output_bytes
        )
        return {**{name: getattr(self, name) for name in names}, "limits": limits}


def result_to_json(result: ExecutionResult) -> dict[str, Any]:
    return {**asdict(result), "files": {name: base64.b64encode(data).decode() for name, data in result.files.items()}}


def result_from_json(body: dict[str, Any]) -> ExecutionResult:
    """Raises ``SandboxFailure`` when it is none: the other side is of another version."""
    try:
        files = {name: base64.b64decode(data) for name, data in body["files"].items()}
        return ExecutionResult(**{**body, "files": files})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SandboxFailure(f"the service's answer is no result ({error})") from error


FUSION_LANGUAGES = {"python": "python", "bash": "bash", "nodejs": "node", "perl": "perl", "ruby": "ruby"}
"""SandboxFusion's names of languages that need no compiler, and the interpreters they stand for."""


class FusionCall(BaseModel):
    """SandboxFusion's ``RunCodeRequest`` (bytedance/SandboxFusion, sandbox/server/sandbox_api.py)."""

    code: str
    language: str
    run_timeout: float = Field(10, gt=0, le=MAX_TIMEOUT_S)
    compile_timeout: float = 10  # nothing is compiled
    memory_limit_MB: int = -1
    stdin: str | None = None
    files: dict[str, Base64Bytes | None] = {}
    fetch_files: list[str] = []

    def call(self) -> Call:
        """Raises ``ValueError`` for a language that is none of ours."""
        if self.language not in FUSION_LANGUAGES:
            raise ValueError(f"language {self.language!r}: one of {', '.join(FUSION_LANGUAGES)}")
        return Call(
            code=self.code,
            language=FUSION_LANGUAGES[self.language],
            timeout_s=self.run_timeout,
            memory_mb=self.memory_limit_MB if self.memory_limit_MB > 0 else None,
            stdin=self.stdin,
            files={name: base64.b64encode(data) for name, data in self.files.items() if data is not None},
            fetch=self.fetch_files,
        )


def fusion_answer(result: ExecutionResult) -> dict[str, Any]:
    """SandboxFusion's ``RunCodeResponse``."""
    return {
        "status": "Success" if result.status == "ok" else "Failed",
        "message": "",
        "compile_result": None,
        "run_result": {
            "status": "TimeLimitExceeded" if result.status == "timeout" else "Finished",
            "execution_time": result.wall_s,
            "return_code": result.exit_code,
            "stdout": result.stdout,
            "stderr": result.stderr,
        },
        "executor_pod_name": None,
        "files": {name: base64.b64encode(data).decode() for name, data in result.files.items()},
    }


def fusion_failure(message: str) -> dict[str, Any]:
    return {
        "status": "SandboxError",
        "message": message,
        "compile_result": None,
        "run_result": None,
        "executor_pod_name": None,
        "files": {},
    }
