"""The error tree, typed by the boundary that broke.

    EtudeError
    +-- RecipeError      a recipe, an option or a file of the user is wrong        exit 2
    +-- ModelError       a model folder is broken or of a family we do not support exit 2
    +-- TaskError        a task file is broken or a task is malformed              exit 2
    +-- WorkspaceError   a person's folder cannot be read or written as asked      exit 1
    +-- RunError         a run's folder cannot be used as asked                    exit 1
    +-- SandboxError     isolation is missing, or a sandbox's machine broke        exit 1
    |   +-- SandboxDiedError one sandbox ended under its user: see SEMANTICS 6.2 for whose fault that is
    +-- EngineError      the engine refused or died                                exit 1
    |   +-- RequestError     malformed, too long: the request's own fault
    |   +-- VersionError     the asked step or version cannot be served (HTTP 409)
    |   +-- OverloadedError  back-pressure: try again later
    +-- RewardError      grading could not be carried out                          exit 1
    +-- SessionError     a log of an agent cannot be read                          exit 2
    +-- StoreError       a store of weights or sessions is unusable, or something in it is wrong  exit 1
        +-- MissingError     a named object is gone
        +-- LostRaceError    another publisher owns this version or incarnation

Every message names the thing, `cause` says why, `hint` says what to do. A failing agent is data, never an error.
"""

from __future__ import annotations


class EtudeError(Exception):
    """Base of everything that Etude raises on purpose.

    >>> raise SandboxError("no sandbox can be started", cause="bwrap is not installed", hint="apt install bubblewrap")
    """

    boundary = "etude"
    exit_code = 1

    def __init__(self, message: str, *, cause: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.cause = cause
        self.hint = hint

    def __str__(self) -> str:
        lines = [self.message]
        if self.cause:
            lines.append(f"cause: {self.cause}")
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.cause, self.hint))


def _rebuild(kind: type[EtudeError], message: str, cause: str | None, hint: str | None) -> EtudeError:
    return kind(message, cause=cause, hint=hint)


class RecipeError(EtudeError, ValueError):
    boundary = "recipe"
    exit_code = 2


class ModelError(EtudeError, ValueError):
    boundary = "model"
    exit_code = 2


class TaskError(EtudeError, ValueError):
    boundary = "task"
    exit_code = 2


class WorkspaceError(EtudeError, ValueError):
    boundary = "workspace"


class RunError(EtudeError, RuntimeError):
    boundary = "run"


class LostRankError(RunError):
    """Another process of a sharded fit is gone: this one cannot go on."""


class SandboxError(EtudeError, RuntimeError):
    boundary = "sandbox"


class SandboxDiedError(SandboxError):
    pass


class EngineError(EtudeError, RuntimeError):
    boundary = "engine"


class RequestError(EngineError):
    pass


class VersionError(EngineError):
    pass


class OverloadedError(EngineError):
    pass


class RewardError(EtudeError, RuntimeError):
    boundary = "reward"


class SessionError(EtudeError, ValueError):
    boundary = "session"
    exit_code = 2


class StoreError(EtudeError, OSError):
    boundary = "store"


class MissingError(StoreError):
    pass


class LostRaceError(StoreError):
    pass


BY_NAME: dict[str, type[EtudeError]] = {
    kind.__name__: kind
    for kind in (
        EtudeError, RecipeError, ModelError, TaskError, WorkspaceError, RunError, LostRankError, SandboxError,
        SandboxDiedError, EngineError, RequestError, VersionError, OverloadedError, RewardError, SessionError,
        StoreError, MissingError, LostRaceError,
    )
}  # fmt: skip
"""For `frames`, which carries errors between processes by name."""
