"""What the actors need of a store, as protocols: each method says its guarantee and what cancellation means.

`sqlstreams.postgres` implements them. Every method of a store raises, besides the errors it names,
`StoreUnavailable` (nothing was done), `Contended` (a lock was not free in time; nothing was done) and, where it writes,
`OutcomeUnknown` (sent and never answered).
"""

from sqlstreams.store.protocols import ClaimStore as ClaimStore
from sqlstreams.store.protocols import ExceptionStore as ExceptionStore
from sqlstreams.store.protocols import LogStore as LogStore
from sqlstreams.store.protocols import NodeStore as NodeStore
from sqlstreams.store.protocols import OperateStore as OperateStore
from sqlstreams.store.protocols import RegistryStore as RegistryStore
from sqlstreams.store.protocols import Store as Store
from sqlstreams.store.values import ClaimedException as ClaimedException
from sqlstreams.store.values import DeadRow as DeadRow
from sqlstreams.store.values import Due as Due
from sqlstreams.store.values import GroupDue as GroupDue
from sqlstreams.store.values import GroupRow as GroupRow
from sqlstreams.store.values import Held as Held
from sqlstreams.store.values import Holder as Holder
from sqlstreams.store.values import InspectedRow as InspectedRow
from sqlstreams.store.values import LogRef as LogRef
from sqlstreams.store.values import MessageRow as MessageRow
from sqlstreams.store.values import NodeRow as NodeRow
from sqlstreams.store.values import OutgoingRow as OutgoingRow
from sqlstreams.store.values import RangeRecord as RangeRecord
from sqlstreams.store.values import Seen as Seen
from sqlstreams.store.values import SnapshotRow as SnapshotRow
from sqlstreams.store.values import StreamRow as StreamRow
from sqlstreams.store.values import Taken as Taken
from sqlstreams.store.values import Watched as Watched

__all__ = [
    "ClaimStore",
    "ClaimedException",
    "DeadRow",
    "Due",
    "ExceptionStore",
    "GroupDue",
    "GroupRow",
    "Held",
    "Holder",
    "InspectedRow",
    "LogRef",
    "LogStore",
    "MessageRow",
    "NodeRow",
    "NodeStore",
    "OperateStore",
    "OutgoingRow",
    "RangeRecord",
    "RegistryStore",
    "Seen",
    "SnapshotRow",
    "Store",
    "StreamRow",
    "Taken",
    "Watched",
]
