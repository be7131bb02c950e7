"""Settings of the server. Light: it loads no fastapi."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from etude.errors import RecipeError
from etude.protocols import Consent

ANY = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRecipe:
    """Where to listen, for whom, and the limits of a request."""

    host: str = "127.0.0.1"
    """Address to listen on. Any but this machine's own needs `keys`."""
    port: int = 8000
    """0: one that is free."""
    keys: str = ""
    """File of keys (TOML); empty: nobody is asked for one."""
    consent: str = "none"
    """none, keep or train: what the person at this machine allows, where there are no keys. With none nothing is
    stored."""
    names: tuple[str, ...] = ()
    """Names of the model in requests; none: its own. "*": any name will do."""
    strict: bool = False
    """Whether sampling options that the engine does not have (top_p, penalties, ...) are refused. Otherwise they are
    left out, and named in the answer's header x-etude-ignored."""
    agent: bool = False
    """Whether the agent endpoint is there, which runs tools in sandboxes."""
    agent_sessions: int = 16
    """Sessions of the agent endpoint at once, each with a sandbox of its own."""
    agent_idle_s: float = 1800.0
    """So long an unused agent session keeps its sandbox."""
    reply_tokens: int = 8192
    """Tokens of a reply, where the request does not say."""
    max_body_bytes: int = 16 << 20
    """Of one request."""
    max_messages: int = 4096
    """Of one request."""
    max_tools: int = 512
    """Of one request."""
    max_depth: int = 64
    """Levels of the JSON inside a request."""
    max_requests: int = 512
    """Answered at once; beyond that the server says that it is overloaded."""
    body_timeout_s: float = 30.0
    """From a connection's first byte to the end of its request's head, and from there to the end of its body."""
    send_timeout_s: float = 60.0
    """For a client to take what it is sent."""
    idle_timeout_s: float = 30.0
    """For a connection between two requests."""
    drain_s: float = 30.0
    """Between SIGTERM and the end: requests that run may finish, new ones are refused."""
    remembered_windows: int = 2048
    """Token windows that are kept to be matched with histories."""
    remembered_tokens: int = 32_000_000
    """Of all these windows together; four bytes each."""

    def __post_init__(self) -> None:
        if self.consent not in tuple(Consent):
            raise RecipeError(f"serve.consent = {self.consent!r} is unknown", hint=", ".join(Consent))
        if not 0 <= self.port < 1 << 16:
            raise RecipeError(f"serve.port = {self.port} is no port", hint="0 to 65535")
        counts = ("agent_sessions", "reply_tokens", "max_body_bytes", "max_messages", "max_tools", "max_depth",
                  "max_requests", "remembered_windows", "remembered_tokens")  # fmt: skip
        for name in counts:
            if getattr(self, name) < 1:
                raise RecipeError(f"serve.{name} = {getattr(self, name)} must be at least 1")
        for name in ("body_timeout_s", "send_timeout_s", "idle_timeout_s", "drain_s", "agent_idle_s"):
            if not getattr(self, name) > 0:
                raise RecipeError(f"serve.{name} = {getattr(self, name)} must be more than 0")
        if not self.keys and not is_loopback(self.host):
            raise RecipeError(
                f"serve.host = {self.host!r} can be reached by others",
                cause="there are no keys: anybody could use it, and what they say would be recorded as yours",
                hint="name a file of keys with --keys (docs/serve.md), or listen on 127.0.0.1",
            )

    @property
    def records(self) -> bool:
        """Whether anybody may have consented."""
        return bool(self.keys) or self.consent != Consent.NONE


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
