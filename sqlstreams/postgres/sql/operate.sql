-- instant: the database's time, to tell what was dead when a redrive began.
select {schema}.clock();

-- redrive: give dead letters a fresh budget; they are due at once. Its caller holds the stream's lock, so that retention cannot
-- drop a message between its look and this. Letters that died after $4 are left alone.
-- $1 group  $2 ids or null  $3 part of the error or null  $4 died until  $5 rows at most
update {schema}.exception_queue_{stream} e
set status = 'ready', attempts = 0, delays = 0, can_run_after = (select {schema}.clock()), token = null, node_id = null,
  updated_at = (select {schema}.clock())
where e.group_id = $1 and e.message_id in (
    select k.message_id from {schema}.exception_queue_{stream} k
    where k.group_id = $1 and k.status = 'dead' and k.updated_at <= $4
      and ($2::bigint[] is null or k.message_id = any($2)) and ($3::text is null or position($3 in coalesce(k.last_error, '')) > 0)
    order by k.message_id limit $5
    for update of k skip locked)
returning e.message_id;

-- discard: delete dead letters for good, and note it in the history.
-- $1 group  $2 ids or null  $3 part of the error or null  $4 died until  $5 rows at most
with gone as (
  delete from {schema}.exception_queue_{stream} e
  where e.group_id = $1 and e.message_id in (
      select k.message_id from {schema}.exception_queue_{stream} k
      where k.group_id = $1 and k.status = 'dead' and k.updated_at <= $4
        and ($2::bigint[] is null or k.message_id = any($2)) and ($3::text is null or position($3 in coalesce(k.last_error, '')) > 0)
      order by k.message_id limit $5
      for update of k skip locked)
  returning e.message_id, e.attempts, e.last_error
),
noted as (
  insert into {schema}.delivery_log_{stream} (group_id, message_id, attempt, status, error)
  select $1, g.message_id, g.attempts, 'discarded', g.last_error from gone g
)
select g.message_id from gone g;

-- inspect_message: whether it is in the log, and how far the group has handed out. $1 group  $2 message
select exists (select from {schema}.message_log_{stream} m where m.id = $2) as present,
  (select c.high from {schema}.claim_{stream} c where c.group_id = $1 order by c.low desc limit 1) as newest_high,
  coalesce(pg_sequence_last_value('{schema}.message_log_{stream}_id'::regclass), 0) as head,
  (select g.committed from {schema}.group_cursor g where g.group_id = $1) as committed;

-- inspect_range: the open range a message is in, and who has it. $1 group  $2 message
select c.low, c.high, greatest(c.low, c.done_through) as through, c.fence, c.reclaims, n.name, n.pid, n.ended_at is not null as ended
from {schema}.claim_{stream} c
left join {schema}.node n on n.id = c.node_id
where c.group_id = $1 and c.low < $2 and c.high >= $2 and not c.done
order by c.low desc
limit 1;

-- inspect_exception: the exception a message has in a group. $1 group  $2 message
select e.status, e.attempts, e.delays, e.last_error, e.can_run_after, e.fence, n.name, n.pid, n.ended_at is not null as ended
from {schema}.exception_queue_{stream} e
left join {schema}.node n on n.id = e.node_id
where e.group_id = $1 and e.message_id = $2;

-- inspect_history: what became of it, run by run. $1 group  $2 message
select h.attempt, h.status, h.error, h.at from {schema}.delivery_log_{stream} h
where h.group_id = $1 and h.message_id = $2
order by h.at
limit 1000;

-- seek_range: how many messages a seek would hand out again, the first and the last. $1 above  $2 head
select count(*), min(m.id), max(m.id) from {schema}.message_log_{stream} m where m.id > $1 and m.id <= $2;

-- seek_claims: forget what was handed out: from here on no owner can record. $1 group
delete from {schema}.claim_{stream} where group_id = $1;

-- seek_exceptions: in a later statement than the claims: an owner that was recording may have added some. $1 group  $2 target
delete from {schema}.exception_queue_{stream} where group_id = $1 and message_id > $2;

-- seek_marks: the new position; the epoch guards it against an advancer that read before. $1 group  $2 target
update {schema}.group_cursor set epoch = epoch + 1, ranges_done = $2, committed = least($2,
    (select min(e.message_id) - 1 from {schema}.exception_queue_{stream} e
      where e.group_id = $1 and e.status in ('ready', 'inflight', 'deferred', 'parked')))
where group_id = $1 returning epoch;

-- claim_lock: the lock under which ranges of a group are handed out. $1 group
select pg_advisory_xact_lock('{schema}.claim_{stream}'::regclass::oid::int, $1::bigint::int);

-- created_at: when the first message from an id on was created. $1 id
select m.id, m.created_at from {schema}.message_log_{stream} m where m.id >= $1 order by m.id limit 1;

-- before_instant: the first message from an id on that is not older, and the newest one below it that is there, in one snapshot: an id
-- between them may still appear. $1 id  $2 instant
select m.id, (select max(k.id) from {schema}.message_log_{stream} k where k.id < m.id)
from {schema}.message_log_{stream} m
where m.id >= $1 and m.created_at >= $2
order by m.id
limit 1;
