-- claim_exceptions: hand out exceptions that are due; those that come back dead are beyond their budget and must not run.
-- $1 group  $2 node  $3 token  $4 versions read  $5 max retries  $6 limit  $7 keep history
select message_id, status, attempts, delays, fence from {schema}.claim_exceptions_{stream}($1, $2, $3, $4, $5, $6, $7);

-- record_exception: record what became of one exception.
-- $1 group  $2 message  $3 token  $4 status or 'done'  $5 attempts  $6 delays  $7 wait  $8 error  $9 node
-- $10 history: attempt  $11 history: status or null
select {schema}.record_exception_{stream}($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11);

-- dead_letters: the dead of a group in id order. $1 group  $2 after  $3 limit  $4 part of the error, or null
select e.message_id, e.attempts, e.delays, e.last_error, e.message_key, coalesce(m.created_at, e.created_at) as created_at,
  e.updated_at, m.payload, m.id as present
from {schema}.exception_queue_{stream} e
left join {schema}.message_log_{stream} m on m.id = e.message_id
where e.group_id = $1 and e.status = 'dead' and e.message_id > $2
  and ($4::text is null or position($4 in coalesce(e.last_error, '')) > 0)
order by e.message_id
limit $3;

-- group_snapshot: where a group stands. $1 group
with marks as (
  select g.group_id, g.ranges_done, g.committed, c.paused_at,
    (select k.high from {schema}.claim_{stream} k where k.group_id = g.group_id order by k.low desc limit 1) as newest_high
  from {schema}.group_cursor g
  join {schema}.consumer_group c on c.id = g.group_id
  where g.group_id = $1
),
open as (
  select count(*) as ranges, coalesce(sum(c.high - greatest(c.low, c.done_through)), 0)::bigint as ids,
    min(c.low) as low, min(greatest(c.low, c.done_through)) as through,
    array_agg(distinct n.name || ' (' || n.pid || ')') filter (where n.id is not null) as holders
  from marks m
  join {schema}.claim_{stream} c on c.group_id = m.group_id and c.low >= m.ranges_done and not c.done
  left join {schema}.node n on n.id = c.node_id
),
unresolved as (
  select count(*) as rows, min(e.message_id) as lowest,
    count(*) filter (where e.status = 'inflight') as inflight, count(*) filter (where e.status = 'ready') as ready,
    count(*) filter (where e.status = 'deferred') as deferred, count(*) filter (where e.status = 'parked') as parked
  from {schema}.exception_queue_{stream} e
  where e.group_id = $1 and e.status in ('ready', 'inflight', 'deferred', 'parked')
)
select m.newest_high, m.ranges_done, m.committed, m.paused_at is not null as paused,
  o.ranges, o.ids, o.low as open_low, o.through as open_through, o.holders,
  u.rows as unresolved, u.lowest, u.inflight, u.ready, u.deferred, u.parked,
  coalesce(pg_sequence_last_value('{schema}.message_log_{stream}_id'::regclass),
    case when has_sequence_privilege('{schema}.message_log_{stream}_id'::regclass, 'usage, select') then 0
      else currval('{schema}.message_log_{stream}_id'::regclass) end) as head -- currval says that it may not be looked at
from marks m cross join open o cross join unresolved u;

-- count_dead: how many dead letters a group has. $1 group
select count(*) from {schema}.exception_queue_{stream} where group_id = $1 and status = 'dead';

-- age_above: how old the first message above an id is, in seconds; no row when there is none. $1 id  $2 head
select extract(epoch from (select {schema}.clock()) - m.created_at)::float8 as age, m.id
from {schema}.message_log_{stream} m
where m.id > $1 and m.id <= $2
order by m.id
limit 1;

-- exception_of: what holds a group back at one message. $1 group  $2 message
select e.message_id, e.status, e.attempts, e.delays, e.schema_version, e.last_error, e.can_run_after
from {schema}.exception_queue_{stream} e
where e.group_id = $1 and e.message_id = $2;
