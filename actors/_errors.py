"""The errors of this package.

ActorError
├── ChildrenClosed        start() came after the block began to end; nothing was started
├── MailboxClosed         nobody will receive this, or answer it, any more
├── MailboxFull           no room and the caller would not wait; nothing was told
├── NameTaken             a child of this name has not ended yet; nothing was started
├── NeverStarted          the actor ended before it called started()
├── RestartLimitReached   the actor ended more often than its intensity allows; its last failure is the cause
└── TickOverrun           a tick was cut at its deadline
"""


class ActorError(Exception):
    """What every error of this package is."""


class ChildrenClosed(ActorError):
    """start() came after the block began to end; nothing was started."""

    def __init__(self, name: str) -> None:
        """Name the child that was refused."""
        super().__init__(f"{name} was not started: the children are being stopped")
        self.name = name


class MailboxClosed(ActorError):
    """The mailbox is closed: nothing more is told, and nobody will answer what is still open."""


class MailboxFull(ActorError):
    """The mailbox has no room and the caller would not wait; nothing was told."""

    def __init__(self, size: int) -> None:
        """Name the limit that was reached."""
        super().__init__(f"the mailbox holds its {size} messages already")
        self.size = size


class NameTaken(ActorError):
    """A child of this name has not ended yet; nothing was started."""

    def __init__(self, name: str) -> None:
        """Name the child that is still there."""
        super().__init__(f"a child named {name} has not ended yet")
        self.name = name


class NeverStarted(ActorError):
    """The actor ended, or was stopped, before it called started()."""

    def __init__(self, name: str) -> None:
        """Name the actor."""
        super().__init__(f"{name} ended before it called started()")
        self.name = name


class RestartLimitReached(ActorError):
    """The actor ended more often than its intensity allows; `__cause__` is the last failure, if it failed."""

    def __init__(self, name: str, limit: int, within: float) -> None:
        """Name the actor and the limit: `limit` restarts within `within` seconds."""
        super().__init__(f"{name} needed more than {limit} restarts within {within:g} s")
        self.name = name
        self.limit = limit
        self.within = within


class TickOverrun(ActorError):
    """A tick took longer than its deadline, in seconds, and was cut; `__cause__` is what it made of that, if anything."""

    def __init__(self, deadline: float) -> None:
        """Name the deadline."""
        super().__init__(f"the tick was not done within {deadline:g} s")
        self.deadline = deadline
