-- claim_range: append the group's next range. No row: nothing above the newest range is settled.
-- $1 group  $2 limit  $3 settled  $4 server run  $5 node  $6 token
select low, high, fence, empty from {schema}.claim_range_{stream}($1, $2, $3, $4, $5, $6);

-- reclaim_range: take over the lowest range of an ended node, or one that was handed back.
-- $1 group  $2 node  $3 token  $4 ranges_done  $5 most reclaims  $6 versions read  $7 park other versions
select low, high, start_above, fence, reclaims, quarantined from {schema}.reclaim_range_{stream}($1, $2, $3, $4, $5, $6, $7);

-- record_range: record a range, a resolved prefix of it, or hand it back; 'recorded' or 'already'.
select {schema}.record_range_{stream}($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19);

-- finish_range: record a range of which every message succeeded. One row, or the token no longer holds it.
-- $1 group  $2 low  $3 token
update {schema}.claim_{stream} set done = true, node_id = null where group_id = $1 and low = $2 and token = $3 and not done
returning low;

-- read_progress: all that the two marks depend on, in one snapshot. Ranges do not overlap, so the lowest open one has the lowest
-- done_through as well.
-- $1 group
select g.epoch, g.ranges_done, g.committed,
  (select c.high from {schema}.claim_{stream} c where c.group_id = g.group_id order by c.low desc limit 1) as newest_high,
  o.low as open_low, greatest(o.low, o.done_through) as open_through,
  (select min(e.message_id) from {schema}.exception_queue_{stream} e
    where e.group_id = g.group_id and e.status in ('ready', 'inflight', 'deferred', 'parked')) as unresolved
from {schema}.group_cursor g
left join lateral (
  select c.low, c.done_through from {schema}.claim_{stream} c
  where c.group_id = g.group_id and c.low >= g.ranges_done and not c.done
  order by c.low limit 1
) o on true
where g.group_id = $1;

-- advance: move a group's marks forward, never back. One row when one moved; none otherwise, or after a seek.
-- $1 group  $2 epoch as read  $3 ranges_done  $4 committed, computed by an earlier statement (not this snapshot's)
update {schema}.group_cursor
set ranges_done = greatest(ranges_done, $3), committed = greatest(committed, $4)
where group_id = $1 and epoch = $2 and (ranges_done < $3 or committed < $4)
returning ranges_done, committed;

-- delete_done_claims: delete done ranges below ranges_done, never the newest; the guard stands in the same statement.
-- $1 group  $2 epoch as read  $3 ranges_done  $4 rows at most
delete from {schema}.claim_{stream} c
where c.group_id = $1 and c.low in (
    select k.low from {schema}.claim_{stream} k
    where k.group_id = $1 and k.done and k.low < $3
    order by k.low limit $4)
  and c.done and c.low < (select max(k.low) from {schema}.claim_{stream} k where k.group_id = $1)
  and exists (select from {schema}.group_cursor g where g.group_id = $1 and g.epoch = $2);

-- held: what Postgres says a node holds of a group. $1 group  $2 node  $3 ranges_done
select c.low as id, c.token, 'range' as kind from {schema}.claim_{stream} c
where c.group_id = $1 and c.low >= $3 and not c.done and c.node_id = $2
union all
select e.message_id, e.token, 'exception' from {schema}.exception_queue_{stream} e
where e.group_id = $1 and e.status = 'inflight' and e.node_id = $2;

-- release_range: give a range back that nobody here runs; no reclaim is counted. $1 group  $2 low  $3 token
update {schema}.claim_{stream} set node_id = null, token = null where group_id = $1 and low = $2 and token = $3 and not done
returning low;

-- release_exception: give an exception back that nobody here runs; no attempt is counted. $1 group  $2 message  $3 token
update {schema}.exception_queue_{stream} set status = 'ready', node_id = null, token = null, updated_at = (select {schema}.clock())
where group_id = $1 and message_id = $2 and token = $3 and status = 'inflight'
returning message_id;
