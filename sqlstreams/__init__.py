"""SQLStreams: the messaging platform that is just Postgres, as structured-concurrency actors on trio.

async with sqlstreams.connect("postgresql://…") as client:
    orders = client.stream("orders.placed", OrderPlaced)
    await orders.register()
    await orders.produce(OrderPlaced("o-1", 4200))
    billing = orders.consumer("billing")
    await billing.register()
    await billing.consume(handle)
"""

from sqlstreams._version import __version__ as __version__
from sqlstreams.client import Client as Client
from sqlstreams.client import connect as connect
from sqlstreams.config import ConsumeOptions as ConsumeOptions
from sqlstreams.config import GroupConfig as GroupConfig
from sqlstreams.config import LeaseConfig as LeaseConfig
from sqlstreams.config import StreamConfig as StreamConfig
from sqlstreams.consumer import ConsumerGroup as ConsumerGroup
from sqlstreams.consumer import DeadLetter as DeadLetter
from sqlstreams.consumer import GroupSnapshot as GroupSnapshot
from sqlstreams.embedded import embedded as embedded
from sqlstreams.errors import AlreadyExists as AlreadyExists
from sqlstreams.errors import AuthenticationFailed as AuthenticationFailed
from sqlstreams.errors import ClientClosed as ClientClosed
from sqlstreams.errors import ConfigurationError as ConfigurationError
from sqlstreams.errors import Contended as Contended
from sqlstreams.errors import DestroyRefused as DestroyRefused
from sqlstreams.errors import EmbeddedFailed as EmbeddedFailed
from sqlstreams.errors import GroupBusy as GroupBusy
from sqlstreams.errors import GroupDamaged as GroupDamaged
from sqlstreams.errors import LeaseLost as LeaseLost
from sqlstreams.errors import LimitExceeded as LimitExceeded
from sqlstreams.errors import LogDamaged as LogDamaged
from sqlstreams.errors import NotBuiltYet as NotBuiltYet
from sqlstreams.errors import NotFound as NotFound
from sqlstreams.errors import NotInstalled as NotInstalled
from sqlstreams.errors import OutcomeUnknown as OutcomeUnknown
from sqlstreams.errors import PartitionMissing as PartitionMissing
from sqlstreams.errors import PayloadInvalid as PayloadInvalid
from sqlstreams.errors import PermissionDenied as PermissionDenied
from sqlstreams.errors import SchemaTooNew as SchemaTooNew
from sqlstreams.errors import ServerRunChanged as ServerRunChanged
from sqlstreams.errors import SettleTimeout as SettleTimeout
from sqlstreams.errors import SQLStreamsError as SQLStreamsError
from sqlstreams.errors import StatementRefused as StatementRefused
from sqlstreams.errors import StoreUnavailable as StoreUnavailable
from sqlstreams.errors import TransactionAborted as TransactionAborted
from sqlstreams.errors import TransactionInUse as TransactionInUse
from sqlstreams.model.lag import Lag as Lag
from sqlstreams.model.outcome import Delay as Delay
from sqlstreams.model.outcome import Terminal as Terminal
from sqlstreams.operations import Inspection as Inspection
from sqlstreams.operations import Position as Position
from sqlstreams.operations import Seeked as Seeked
from sqlstreams.producer import Outgoing as Outgoing
from sqlstreams.producer import Sent as Sent
from sqlstreams.runtime.handler import Meta as Meta
from sqlstreams.store import GroupRow as GroupInfo
from sqlstreams.store import NodeRow as NodeStatus
from sqlstreams.store import StreamRow as StreamInfo
from sqlstreams.stream import Message as Message
from sqlstreams.stream import Stream as Stream
from sqlstreams.transaction import Transaction as Transaction

__all__ = [
    "AlreadyExists",
    "AuthenticationFailed",
    "Client",
    "ClientClosed",
    "ConfigurationError",
    "ConsumeOptions",
    "ConsumerGroup",
    "Contended",
    "DeadLetter",
    "Delay",
    "DestroyRefused",
    "EmbeddedFailed",
    "GroupBusy",
    "GroupConfig",
    "GroupDamaged",
    "GroupInfo",
    "GroupSnapshot",
    "Inspection",
    "Lag",
    "LeaseConfig",
    "LeaseLost",
    "LimitExceeded",
    "LogDamaged",
    "Message",
    "Meta",
    "NodeStatus",
    "NotBuiltYet",
    "NotFound",
    "NotInstalled",
    "OutcomeUnknown",
    "Outgoing",
    "PartitionMissing",
    "PayloadInvalid",
    "PermissionDenied",
    "Position",
    "SQLStreamsError",
    "SchemaTooNew",
    "Seeked",
    "Sent",
    "ServerRunChanged",
    "SettleTimeout",
    "StatementRefused",
    "StoreUnavailable",
    "Stream",
    "StreamConfig",
    "StreamInfo",
    "Terminal",
    "Transaction",
    "TransactionAborted",
    "TransactionInUse",
    "__version__",
    "connect",
    "embedded",
]
