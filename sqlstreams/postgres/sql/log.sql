-- observe: first each log's sequence, then, in one scan, who holds the lock that a writer of a log takes before it draws an id.
-- The order is the proof: once no holder seen here holds the lock any more, every id up to its head is settled. The first CTE is
-- aggregated to one row, so all heads are read before the lateral part, which depends on it, starts.
-- Null means never used, or from Postgres 17 on no right to look: then currval says so, as 42501, before it does anything.
-- $1 stream ids  $2 oids of their sequences  $3 oids of their logs
with h as materialized (
  select array_agg(w.stream_id order by w.at) as streams, array_agg(coalesce(pg_sequence_last_value(w.seq),
    case when has_sequence_privilege(w.seq, 'usage, select') then 0 else currval(w.seq::regclass) end) order by w.at) as heads
  from unnest($1::bigint[], $2::oid[]) with ordinality as w (stream_id, seq, at)
)
select h.streams, h.heads, (select r.id from {schema}.server_run r) as run, pg_postmaster_start_time() as started,
  l.logs, l.writers, l.pids
from h cross join lateral (
  select array_agg(k.relation) as logs, array_agg(k.virtualtransaction) as writers, array_agg(k.pid) as pids
  from pg_locks k
  where h.heads is not null and k.locktype = 'relation' and k.mode = 'RowExclusiveLock' and k.granted
    and k.relation = any($3::oid[]) and k.database = (select d.oid from pg_database d where d.datname = current_database())
) l;

-- holders: who keeps a log's head from settling. What the role may not see is null. $1 pids
select a.pid, a.application_name, extract(epoch from clock_timestamp() - a.xact_start)::float8 as age, left(a.query, 200) as query
from pg_stat_activity a
where a.pid = any($1::int[])
order by a.xact_start;

-- log_oids: what observe needs of a stream, whether it is still there, and whether the role may look at its sequence.
select r.log, r.seq, has_sequence_privilege(r.seq, 'usage, select') as allowed, r.seq::regclass::text as name
from (
  select to_regclass('{schema}.message_log_{stream}')::oid as log, to_regclass('{schema}.message_log_{stream}_id')::oid as seq
) r;

-- insert_messages: append messages; ids come back in the order of the arguments.
-- $1 versions  $2 routing keys  $3 message keys  $4 headers  $5 payloads
insert into {schema}.message_log_{stream} (schema_version, routing_key, message_key, headers, payload)
select u.version, u.routing_key, u.message_key, u.headers, u.payload
from unnest($1::int[], $2::text[], $3::text[], $4::json[], $5::json[]) as u (version, routing_key, message_key, headers, payload)
returning id;

-- insert_message: append one. $1 version  $2 routing key  $3 message key  $4 headers  $5 payload
insert into {schema}.message_log_{stream} (schema_version, routing_key, message_key, headers, payload)
values ($1, $2, $3, $4, $5)
returning id;

-- read_range: the messages of (low, high] up to a number of rows and of payload bytes, at least one.
-- The size of a payload that is not compressed costs nothing to know; of a compressed one only the true size counts.
-- $1 low  $2 high  $3 rows at most  $4 bytes at most
select r.id, r.payload, r.schema_version, r.created_at, r.message_key, r.routing_key, r.headers
from (
  select m.id, m.payload, m.schema_version, m.created_at, m.message_key, m.routing_key, m.headers,
    sum(case when pg_column_compression(m.payload) is null then pg_column_size(m.payload)
      else octet_length(json_send(m.payload)) end) over (order by m.id rows between unbounded preceding and 1 preceding) as before
  from {schema}.message_log_{stream} m
  where m.id > $1 and m.id <= $2
  order by m.id
  limit $3
) r
where coalesce(r.before, 0) < $4
order by r.id;

-- read_messages: the messages with these ids. $1 ids
select m.id, m.payload, m.schema_version, m.created_at, m.message_key, m.routing_key, m.headers
from {schema}.message_log_{stream} m
where m.id = any($1::bigint[])
order by m.id;

-- lock_log_again: take a new lock on the log; without it a transaction that missed a partition would miss it again.
lock table only {schema}.message_log_{stream} in access share mode;

-- make_partition: make partition $1 of size $2 unless it is there.
select {schema}.make_partition_{stream}($1, $2);

-- partitions: the partitions that are attached, by number, and the newest id that was drawn.
select coalesce(array_agg(substring(c.relname from '[0-9]+$')::bigint order by substring(c.relname from '[0-9]+$')::bigint), '{}')
  as numbers, coalesce((select pg_sequence_last_value('{schema}.message_log_{stream}_id'::regclass)),
    case when has_sequence_privilege('{schema}.message_log_{stream}_id'::regclass, 'usage, select') then 0
      else currval('{schema}.message_log_{stream}_id'::regclass) end) as head
from pg_inherits i
join pg_class c on c.oid = i.inhrelid
where i.inhparent = '{schema}.message_log_{stream}'::regclass and not i.inhdetachpending;
