"""actors: supervision on trio. Actors, keepers, leases, mailboxes, periodic work, orderly shutdown.

It imports trio and the standard library only. An actor is an async callable that calls `task_status.started()` once it
is usable and then works until it is cancelled. What holds everywhere:

- every wait can be cancelled, and its docstring says what that leaves;
- every queue has a size, every tick a deadline, every stop a grace;
- time is trio's, in seconds, and chance comes in as a `random.Random`: a run can be repeated.
"""

from ._actor import Actor as Actor
from ._actor import ActorSpec as ActorSpec
from ._errors import ActorError as ActorError
from ._errors import ChildrenClosed as ChildrenClosed
from ._errors import MailboxClosed as MailboxClosed
from ._errors import MailboxFull as MailboxFull
from ._errors import NameTaken as NameTaken
from ._errors import NeverStarted as NeverStarted
from ._errors import RestartLimitReached as RestartLimitReached
from ._errors import TickOverrun as TickOverrun
from ._events import ActorEnded as ActorEnded
from ._events import ActorRestarted as ActorRestarted
from ._events import ActorStarted as ActorStarted
from ._events import Event as Event
from ._events import Events as Events
from ._events import EventStatistics as EventStatistics
from ._events import LoggingSink as LoggingSink
from ._events import MemorySink as MemorySink
from ._events import Sink as Sink
from ._events import TickFailed as TickFailed
from ._lease import Lease as Lease
from ._lease import heartbeat as heartbeat
from ._mailbox import Mailbox as Mailbox
from ._mailbox import MailboxStatistics as MailboxStatistics
from ._mailbox import Reply as Reply
from ._periodic import Due as Due
from ._periodic import when_due as when_due
from ._restart import Backoff as Backoff
from ._restart import Intensity as Intensity
from ._restart import RestartKind as RestartKind
from ._restart import should_restart as should_restart
from ._shutdown import Shutdown as Shutdown
from ._shutdown import draining_scope as draining_scope
from ._shutdown import watch_signals as watch_signals
from ._supervisor import Children as Children
from ._supervisor import ChildSnapshot as ChildSnapshot
from ._supervisor import ChildState as ChildState
from ._supervisor import keep as keep
from ._supervisor import open_children as open_children

__all__ = [
    "Actor",
    "ActorEnded",
    "ActorError",
    "ActorRestarted",
    "ActorSpec",
    "ActorStarted",
    "Backoff",
    "ChildSnapshot",
    "ChildState",
    "Children",
    "ChildrenClosed",
    "Due",
    "Event",
    "EventStatistics",
    "Events",
    "Intensity",
    "Lease",
    "LoggingSink",
    "Mailbox",
    "MailboxClosed",
    "MailboxFull",
    "MailboxStatistics",
    "MemorySink",
    "NameTaken",
    "NeverStarted",
    "Reply",
    "RestartKind",
    "RestartLimitReached",
    "Shutdown",
    "Sink",
    "TickFailed",
    "TickOverrun",
    "draining_scope",
    "heartbeat",
    "keep",
    "open_children",
    "should_restart",
    "watch_signals",
    "when_due",
]
