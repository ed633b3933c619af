"""Whether a group is drained: every id up to the head at the start is resolved, or waits for a retry.

Ids above that head count for nothing, so a group that is produced to all the time is drained as well. Parked messages
wait for a consumer of another version and hold nobody up.
"""

from __future__ import annotations

from typing import Any

import sqlstreams
from sqlstreams.cli._options import Settings
from sqlstreams.cli._running import SCHEMA
from sqlstreams.errors import NotFound
from sqlstreams.model.names import quote_ident

__all__ = ["Drained"]

# $1 group  $2 head. In one snapshot, since a message that leaves its range as a failure appears among the exceptions.
REACHED = """
select (
    select c.high from {schema}.claim_{stream} c where c.group_id = g.group_id order by c.low desc limit 1
  ) >= $2
  and not exists (
    select from {schema}.claim_{stream} c
    where c.group_id = g.group_id and c.low >= g.ranges_done and not c.done and greatest(c.low, c.done_through) < $2)
  and not exists (
    select from {schema}.exception_queue_{stream} e
    where e.group_id = g.group_id and e.message_id <= $2
      and (e.status in ('inflight', 'deferred')
        or (e.status = 'ready' and e.can_run_after <= (select {schema}.clock()))))
from {schema}.group_cursor g
where g.group_id = $1
"""


class Drained:
    """Asks whether a group has come to a head.

    Args:
        client: where to ask.
        query: made for the group's stream.
        group: its id.
        head: an id.
    """

    def __init__(self, client: sqlstreams.Client, query: str, group: int, head: int) -> None:
        self._client = client
        self._query = query
        self._group = group
        self._head = head

    @classmethod
    async def of(
        cls, client: sqlstreams.Client, group: sqlstreams.ConsumerGroup[Any], settings: Settings
    ) -> Drained:
        """Observe the head now. Raises: NotFound."""
        row, lag = await group.get(), await group.lag()
        if row is None:
            raise NotFound("it was destroyed", subject=f"group {group.name!a}")
        schema = quote_ident(settings.schema or SCHEMA)
        return cls(client, REACHED.format(schema=schema, stream=row.stream_id), row.id, lag.head)

    async def reached(self) -> bool:
        """Say whether everything up to the head is resolved or waits for a retry. Raises: StoreUnavailable and the like."""
        async with self._client.transaction() as tx:
            return bool(await tx.fetchval(self._query, self._group, self._head))
