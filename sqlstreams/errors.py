"""Every error this package raises on purpose, each with a stable code.

SQLStreamsError
├── ConfigurationError        a setting, name or declaration is wrong; nothing was done
│   └── NotBuiltYet           the feature is specified, but not in this release; nothing was done
├── PayloadInvalid            a payload, key or header cannot be stored as it is; nothing was done
│   └── LimitExceeded         it is larger than a documented limit; nothing was done
├── NotFound                  the subject was never registered, or was destroyed
├── AlreadyExists             the name is taken; nothing was changed
├── DestroyRefused            destroying needs a permission or a force that was not given; nothing was destroyed
├── GroupBusy                consumers of the group run; nothing was changed
├── NotInstalled              the schema is not there and installing was not allowed
├── SchemaTooNew              the schema was written by a newer, incompatible release
├── LeaseLost                 the node that held the subject no longer does; nothing was written
├── OutcomeUnknown            committed or not, nobody can say: look before repeating
├── StoreUnavailable          Postgres could not be reached; nothing was done, safe to repeat
├── AuthenticationFailed      Postgres did not accept the credentials
├── PermissionDenied          the role lacks a right
├── Contended                 a lock was not free in time; nothing was done, safe to repeat
│   ├── PartitionMissing      the log's next partition could not be made in time; nothing was stored
│   └── SettleTimeout         a writer stayed open, so the head could not be settled in time
├── TransactionAborted        a statement had failed inside the transaction, so its commit rolled back
├── TransactionInUse          two tasks use one transaction at once; this statement was not sent
├── StatementRefused          Postgres refused a statement for a reason that is not ours; nothing was done
├── LogDamaged                a log's sequence or table was changed by hand; consuming it would lose messages
├── GroupDamaged              a group without claim rows; never read as "caught up"
├── ServerRunChanged          the server crashed or failed over; what was observed before is void
├── ClientClosed              the client was used after its block ended
└── EmbeddedFailed            the private Postgres could not be started or stopped

Payloads and passwords never appear in an error. `sqlstreams explain CODE` prints what this file knows about a code.
"""

from typing import ClassVar

__all__ = [
    "AlreadyExists",
    "AuthenticationFailed",
    "ClientClosed",
    "ConfigurationError",
    "Contended",
    "DestroyRefused",
    "EmbeddedFailed",
    "GroupBusy",
    "GroupDamaged",
    "LeaseLost",
    "LimitExceeded",
    "LogDamaged",
    "NotBuiltYet",
    "NotFound",
    "NotInstalled",
    "OutcomeUnknown",
    "PartitionMissing",
    "PayloadInvalid",
    "PermissionDenied",
    "SQLStreamsError",
    "SchemaTooNew",
    "ServerRunChanged",
    "SettleTimeout",
    "StatementRefused",
    "StoreUnavailable",
    "TransactionAborted",
    "TransactionInUse",
    "all_errors",
]


class SQLStreamsError(Exception):
    """Base of all errors of this package.

    Attributes:
        code: stable, unique, `SQLS-…`; print what is known about it with `sqlstreams explain CODE`.
        subject: what it is about ("stream 'orders'", "group 'billing'", a setting's name), or None.
        may_retry: whether the same call may succeed later without anybody changing anything.
        what_to_do: one sentence for the person who reads it.
    """

    code: ClassVar[str] = "SQLS-ERROR"
    may_retry: ClassVar[bool] = False
    what_to_do: ClassVar[str] = "Read the message"

    def __init__(self, message: str, *, subject: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.subject = subject

    def __str__(self) -> str:  # type: ignore[explicit-override]  # typing has no override on 3.11
        about = f"{self.subject}: " if self.subject else ""
        return f"[{self.code}] {about}{self.message}. {self.what_to_do}."


class ConfigurationError(SQLStreamsError):
    """A setting, name or declaration is wrong; nothing was done."""

    code = "SQLS-CONFIGURATION"
    what_to_do = "Correct the named setting and call again"


class NotBuiltYet(ConfigurationError):
    """The feature is specified, but this release does not have it; nothing was done."""

    code = "SQLS-NOT-BUILT-YET"
    what_to_do = "Leave the argument out, or wait for the release that brings it"


class PayloadInvalid(SQLStreamsError):
    """A payload, key or header cannot be stored as it is; nothing was stored for this call."""

    code = "SQLS-PAYLOAD-INVALID"
    what_to_do = "Send a value that encodes to valid JSON text without U+0000 in keys and headers"


class LimitExceeded(PayloadInvalid):
    """A payload, key, header or batch is larger than its limit; nothing was stored for this call."""

    code = "SQLS-LIMIT-EXCEEDED"
    what_to_do = "Send less at once, or store the large part elsewhere and send a reference"


class NotFound(SQLStreamsError):
    """The subject was never registered, or was destroyed; nothing was done."""

    code = "SQLS-NOT-FOUND"
    what_to_do = "Register it first, or check the name and the schema"


class AlreadyExists(SQLStreamsError):
    """The name is taken; nothing was changed."""

    code = "SQLS-ALREADY-EXISTS"
    what_to_do = "Choose another name"


class DestroyRefused(SQLStreamsError):
    """Destroying needs a permission or a force that was not given; nothing was destroyed."""

    code = "SQLS-DESTROY-REFUSED"
    what_to_do = "Connect with allow_destroy=True, and pass force=True for what is not empty or still runs"


class GroupBusy(SQLStreamsError):
    """Consumers of the group run, and the call would take their work away; nothing was changed."""

    code = "SQLS-GROUP-BUSY"
    what_to_do = "Stop its consumers first, or pass force=True: what they hold then counts for nothing"


class NotInstalled(SQLStreamsError):
    """The schema is not installed in this database, and installing it was not allowed."""

    code = "SQLS-NOT-INSTALLED"
    what_to_do = "Connect once with install=True and a role that may create a schema"


class SchemaTooNew(SQLStreamsError):
    """The schema was written by a newer release that this one cannot work with; nothing was done."""

    code = "SQLS-SCHEMA-TOO-NEW"
    what_to_do = "Upgrade this program's sqlstreams package"


class LeaseLost(SQLStreamsError):
    """The node that held the subject no longer does; this call wrote nothing."""

    code = "SQLS-LEASE-LOST"
    what_to_do = "Stop working on it: another node may own it already"


class OutcomeUnknown(SQLStreamsError):
    """The last statement was sent and never answered: committed or not, nobody can say."""

    code = "SQLS-OUTCOME-UNKNOWN"
    what_to_do = "Look whether it happened before repeating it"


class StoreUnavailable(SQLStreamsError):
    """Postgres could not be reached, or cut the connection before anything was committed; nothing was done."""

    code = "SQLS-STORE-UNAVAILABLE"
    may_retry = True
    what_to_do = "Check that the server runs and the URL is right; repeating is safe"


class AuthenticationFailed(SQLStreamsError):
    """Postgres did not accept the user, the password or the database name."""

    code = "SQLS-AUTHENTICATION"
    what_to_do = "Check user, password and database in the URL, and pg_hba.conf on the server"


class PermissionDenied(SQLStreamsError):
    """The role lacks a right that this call needs; nothing was done."""

    code = "SQLS-PERMISSION-DENIED"
    what_to_do = "Grant the role the right, or let the schema's owner do it"


class Contended(SQLStreamsError):
    """A lock was not free in time; nothing was done."""

    code = "SQLS-CONTENDED"
    may_retry = True
    what_to_do = "Repeat it; if it persists, look in pg_locks who holds the table"


class PartitionMissing(Contended):
    """The log's next partition could not be made in time; nothing was stored."""

    code = "SQLS-PARTITION-MISSING"
    what_to_do = "Repeat it; if it persists, look in pg_locks who holds the log, and whether the role owns it"


class SettleTimeout(Contended):
    """A writer kept its transaction open, so the head could not be settled in time; nothing was done."""

    code = "SQLS-SETTLE-TIMEOUT"
    what_to_do = "End the named transaction, or repeat the call when it has ended"


class TransactionAborted(SQLStreamsError):
    """A statement had failed inside the transaction and its error was swallowed: the commit rolled back."""

    code = "SQLS-TRANSACTION-ABORTED"
    what_to_do = "Let errors of statements leave the transaction block"


class TransactionInUse(SQLStreamsError):
    """Two tasks use one transaction at once; this statement was not sent."""

    code = "SQLS-TRANSACTION-IN-USE"
    what_to_do = "Give each task its own client.transaction()"


class StatementRefused(SQLStreamsError):
    """Postgres refused a statement; nothing was done by it."""

    code = "SQLS-STATEMENT-REFUSED"
    what_to_do = "Look up the SQLSTATE in the message; the server's log has the details"

    def __init__(self, message: str, *, subject: str | None = None, sqlstate: str | None = None) -> None:
        super().__init__(message, subject=subject)
        self.sqlstate = sqlstate


class LogDamaged(SQLStreamsError):
    """A log's sequence or table was changed by hand so that consuming it would lose messages."""

    code = "SQLS-LOG-DAMAGED"
    what_to_do = "Set the sequence back to CACHE 1 (alter sequence … cache 1) and start the consumer again"


class GroupDamaged(SQLStreamsError):
    """The group has no claim rows, so nobody knows where it stands; never read as "caught up"."""

    code = "SQLS-GROUP-DAMAGED"
    what_to_do = "Somebody deleted rows of the claim table: restore them, or destroy and register the group"


class ServerRunChanged(SQLStreamsError):
    """The server recovered from a crash or failed over; what was observed before is void. Nothing was claimed."""

    code = "SQLS-SERVER-RUN-CHANGED"
    may_retry = True
    what_to_do = "Observe again; consumers do it by themselves"


class ClientClosed(SQLStreamsError):
    """The client was used after its `async with` block ended, or while it is ending."""

    code = "SQLS-CLIENT-CLOSED"
    what_to_do = "Use the client and its handles inside `async with sqlstreams.connect(...)`"


class EmbeddedFailed(SQLStreamsError):
    """The private Postgres could not be found, started or stopped."""

    code = "SQLS-EMBEDDED"
    what_to_do = "Install the extra (pip install 'sqlstreams[embedded]') or a Postgres >= 15, and read the server log named here"


def all_errors() -> dict[str, type[SQLStreamsError]]:
    """Return every error class by its code."""
    found: dict[str, type[SQLStreamsError]] = {}
    todo: list[type[SQLStreamsError]] = [SQLStreamsError]
    while todo:
        cls = todo.pop()
        found[cls.code] = cls
        todo.extend(cls.__subclasses__())
    return dict(sorted(found.items()))
