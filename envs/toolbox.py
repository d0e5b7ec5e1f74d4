"""Tools that ship with the package, beside ``python``: a shell, files, and handing in an answer.

They work in the episode's own sandbox, so files stay from call to call and are gone with the episode.
"""

from __future__ import annotations

from envs.search import search
from envs.tools import Tool, ToolContext, ToolOutput, describe_execution, python, tool

SESSION = "python"
"""Name of the interpreter that ``python_session`` keeps in the episode's sandbox."""


@tool
async def python_session(ctx: ToolContext, code: str) -> ToolOutput:
    """Run Python and see what it prints; variables stay for the next call.

    Args:
        code: the lines to run
    """
    result = await ctx.run(code, keep=True, session=SESSION)
    text = describe_execution(result)
    if result.session_began and ctx.state.get("session_ran"):
        text = f"[the interpreter was restarted: earlier variables are gone]\n{text}"
    ctx.state["session_ran"] = True
    return ToolOutput(text=text, succeeded=result.status == "ok")


@tool
async def bash(ctx: ToolContext, command: str) -> ToolOutput:
    """Run a shell command; files stay for the next one.

    Args:
        command: what bash runs
    """
    return await _run(
        ctx,
        "import subprocess, sys\n"
        f"done = subprocess.run(['bash', '-c', {command!r}], stdin=subprocess.DEVNULL)\n"
        "sys.exit(done.returncode if done.returncode >= 0 else 128 - done.returncode)\n",
    )


@tool
async def read_file(ctx: ToolContext, path: str) -> ToolOutput:
    """Show a text file.

    Args:
        path: of the file
    """
    return await _run(ctx, f"sys.stdout.write(open({path!r}, errors='replace', newline='').read())")


@tool
async def write_file(ctx: ToolContext, path: str, content: str) -> ToolOutput:
    """Write a text file; what was in it is gone.

    Args:
        path: of the file
        content: what it shall hold
    """
    return await _run(ctx, f"print(open({path!r}, 'w').write({content!r}), 'characters written')")


@tool
async def edit_file(ctx: ToolContext, path: str, old: str, new: str) -> ToolOutput:
    """Replace a piece of a text file that stands in it exactly once.

    Args:
        path: of the file
        old: the piece
        new: what takes its place
    """
    return await _run(
        ctx,
        # Ends of lines stay as they are: a piece of one line must not change those of the whole file.
        f"text, old, new = open({path!r}, newline='').read(), {old!r}, {new!r}\n"
        "if text.count(old) != 1: sys.exit(f'the piece stands there {text.count(old)} times; it must be once')\n"
        f"open({path!r}, 'w', newline='').write(text.replace(old, new))\n"
        "print('replaced')",
    )


@tool(ends=True)
def submit(answer: str) -> ToolOutput:
    """Hand in the final answer; this ends the task.

    Args:
        answer: the answer, and nothing else
    """
    return ToolOutput(text="received", answer=answer)


async def _run(ctx: ToolContext, program: str) -> ToolOutput:
    """The program's output; an error of the file system is one line, not a traceback of ours."""
    indented = "\n".join("    " + line for line in program.splitlines())
    guarded = f"import sys\ntry:\n{indented}\nexcept (OSError, UnicodeError) as error:\n    sys.exit(str(error))\n"
    result = await ctx.run(guarded, keep=True)
    return ToolOutput(text=describe_execution(result), succeeded=result.status == "ok")


TOOLBOX: dict[str, Tool] = {
    tool.name: tool for tool in (python, python_session, bash, read_file, write_file, edit_file, search, submit)
}
