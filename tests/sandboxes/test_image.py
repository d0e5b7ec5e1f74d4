"""Images: ours by either way, and a user's own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxes import SandboxSpec, SandboxUnavailable, make_sandbox
from sandboxes.container import connect
from sandboxes.contract import CHECKS, check
from sandboxes.image import PACKAGES, build_on, has_image

DOCKERFILE = Path(__file__).parents[2] / "sandboxes" / "Dockerfile"
TAG = "agent-rl-test-image:latest"


@pytest.fixture
def tag() -> Iterator[str]:
    yield TAG
    if has_image(TAG):
        client = connect()
        client.api.remove_image(TAG, force=True)
        client.close()


def test_both_ways_to_the_image_install_the_same() -> None:
    text = DOCKERFILE.read_text()
    found = re.search(r"--no-install-recommends (.*) \\", text)
    assert found
    assert tuple(found.group(1).split()) == PACKAGES


@pytest.mark.docker
@pytest.mark.slow
async def test_the_dockerfiles_image_keeps_the_contract(tag: str) -> None:
    # On our own image as base: what it installs is there, so that no registry and no network is needed.
    build_on(SandboxSpec().image, tag)
    assert len(await check(lambda: make_sandbox(SandboxSpec(kind="docker", image=tag)))) == len(CHECKS)


@pytest.mark.docker
@pytest.mark.slow
def test_a_base_that_is_not_to_be_had_is_named(tag: str) -> None:
    with pytest.raises(SandboxUnavailable, match=r"docker build on no-such-registry\.invalid/x failed: "):
        build_on("no-such-registry.invalid/x", tag)


@pytest.mark.docker
@pytest.mark.slow
async def test_an_image_without_python_is_refused_by_name(tag: str) -> None:
    client = connect()
    made = client.api.create_container(SandboxSpec().image, command=["true"])["Id"]
    # Only the shell's way to find it is gone: the image stays small to make.
    client.api.commit(made, repository=TAG.partition(":")[0], changes=["ENV PATH=/nowhere"])
    client.api.remove_container(made, force=True)
    client.close()
    box = make_sandbox(SandboxSpec(kind="docker", image=TAG))
    with pytest.raises(SandboxUnavailable, match="python3"):
        await box.start()
    await box.close()
