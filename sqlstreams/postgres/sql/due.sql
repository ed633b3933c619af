-- due_head: whether a node can be ended. Put in front of the parts of due, one for each stream.
with watched as materialized (
  select w.group_id, w.stream_id, w.reads::int[] as reads
  from unnest($1::bigint[], $2::bigint[], $3::text[]) as w (group_id, stream_id, reads)
)
select 0::bigint as group_id, null::bigint as epoch, null::bigint as ranges_done, null::bigint as committed, null::bigint as newest_high,
  null::bigint as open_low, null::bigint as open_through, null::bigint as unresolved, null::timestamptz as updated_at,
  null::bool as paused, null::float8 as due_in,
  exists (select from {schema}.node n where n.ended_at is null and n.expires_at < (select {schema}.clock())) as work;

-- due_part: for each watched group of a stream: its progress, whether a range or exception lost its owner or may be read now
-- (work), and in how many seconds the next exception is due.
select g.group_id, g.epoch, g.ranges_done, g.committed,
  (select c.high from {schema}.claim_{stream} c where c.group_id = g.group_id order by c.low desc limit 1),
  o.low, greatest(o.low, o.done_through),
  (select min(e.message_id) from {schema}.exception_queue_{stream} e
    where e.group_id = g.group_id and e.status in ('ready', 'inflight', 'deferred', 'parked')),
  s.updated_at, s.paused_at is not null,
  (select extract(epoch from e.can_run_after - (select {schema}.clock()))::float8 from {schema}.exception_queue_{stream} e
    where e.group_id = g.group_id and e.status in ('ready', 'inflight', 'deferred') and e.status <> 'inflight'
      and e.schema_version = any(w.reads)
    order by e.can_run_after limit 1),
  exists (
    select from {schema}.claim_{stream} c
    where c.group_id = g.group_id and c.low >= g.ranges_done and not c.done
      and (c.node_id is null or exists (select from {schema}.node n where n.id = c.node_id and n.ended_at is not null)))
  or exists (
    select from {schema}.exception_queue_{stream} e join {schema}.node n on n.id = e.node_id
    where e.group_id = g.group_id and e.status = 'inflight' and n.ended_at is not null and e.schema_version = any(w.reads))
  or exists (
    select from {schema}.exception_queue_{stream} e
    where e.group_id = g.group_id and e.status = 'parked' and e.schema_version = any(w.reads))
from watched w
join {schema}.group_cursor g on g.group_id = w.group_id
join {schema}.consumer_group s on s.id = w.group_id
left join lateral (
  select c.low, c.done_through from {schema}.claim_{stream} c
  where c.group_id = g.group_id and c.low >= g.ranges_done and not c.done
  order by c.low limit 1
) o on true
where w.stream_id = {stream};
