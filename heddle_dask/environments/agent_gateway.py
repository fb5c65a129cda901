"""What a program gets of a gateway: where an agent asks for steps of its trajectory, and by which key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

GATEWAY_PORT = 8911
GATEWAY_URL = f"http://127.0.0.1:{GATEWAY_PORT}"
"""Where a gateway is found in a sandbox that has one: on the sandbox's own loopback interface."""


class AgentGateway(Protocol):
    """The gateway of one trajectory: whoever has its key asks for steps of it, in the API that he speaks."""

    @property
    def url(self) -> str:
        """Base URL in a sandbox with this gateway; OpenAI's clients want ``/v1`` behind it."""

    @property
    def loopback_url(self) -> str:
        """Base URL for other programs on the machine of the first tool worker; empty where none had joined."""

    @property
    def remote_url(self) -> str:
        """Base URL for other machines, ``https://…``; empty unless the first tool worker was given a port and a
        certificate (``HEDDLE_GATEWAY_PORT``, ``HEDDLE_GATEWAY_CERT``, ``HEDDLE_GATEWAY_KEY``).
        """

    @property
    def key(self) -> str:
        """The key of the trajectory, as bearer token or ``x-api-key``. It is valid until `close`."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables by which agents find URL and key."""

    @property
    def requests(self) -> int:
        """Requests that have come, with those that were refused."""

    @property
    def steps(self) -> int:
        """Steps that have ended, in all branches."""

    def close(self) -> None:
        """End the key, and the steps that its requests wait for; so does the end of the program."""


def agent_environment(url: str, key: str) -> dict[str, str]:
    """Environment variables of the clients of OpenAI and Anthropic, and of the agents that use these.

    No proxy is asked for what is on this machine.
    """
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_AUTH_TOKEN": key,
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }
