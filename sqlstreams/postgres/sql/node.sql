-- server_run_ensure: name this server run, by whoever finds the table empty; everybody then reads the same row.
insert into {schema}.server_run (id) values ($1) on conflict do nothing;

-- node_register: register this process, ending the node it was before.
-- $1 name  $2 host  $3 pid  $4 version  $5 ttl  $6 token  $7 former node or null  $8 its token
select {schema}.register_node($1, $2, $3, $4, $5, $6, $7, $8);

-- node_heartbeat: extend the lease. No row: the node has ended.
-- A beat that waited for its row may answer with a lease that is over already; the guard counts from the sending, so it is harmless.
-- $1 node  $2 token  $3 ttl
update {schema}.node
set beats = beats + 1, expires_at = (select {schema}.clock()) + $3
where id = $1 and token = $2 and ended_at is null and expires_at > (select {schema}.clock())
returning beats;

-- node_end_own: end our own node; everything it holds is free at once. $1 node  $2 token
update {schema}.node
set ended_at = (select {schema}.clock())
where id = (select k.id from {schema}.node k where k.id = $1 and k.token = $2 and k.ended_at is null for update skip locked)
returning id;

-- node_expired: which nodes could be ended by anybody.
select id, beats from {schema}.node where ended_at is null and expires_at < (select {schema}.clock()) order by id limit 100;

-- node_live: nodes that have not ended, for a watcher that compares beats by its own clock. $1 own node
select id, beats, extract(epoch from ttl)::float8 from {schema}.node where ended_at is null and id <> $1 order by id;

-- node_end: end somebody's expired node, if it is as we saw it. No row: it lives, or somebody was faster.
-- $1 node  $2 beats as read
update {schema}.node
set ended_at = (select {schema}.clock())
where id = (
  select k.id from {schema}.node k
  where k.id = $1 and k.ended_at is null and k.expires_at < (select {schema}.clock()) and k.beats = $2
  for update skip locked)
returning id;

-- node_end_silent: end a node whose beats stood still for two leases by our own clock, whatever the database's clock says.
-- $1 node  $2 beats as read
update {schema}.node
set ended_at = (select {schema}.clock())
where id = (select k.id from {schema}.node k where k.id = $1 and k.ended_at is null and k.beats = $2 for update skip locked)
returning id;

-- node_list: the nodes, newest first. $1 also ended ones
select n.id, n.name, n.host, n.pid, n.version, n.started_at, n.ended_at,
  extract(epoch from n.expires_at - (select {schema}.clock()))::float8 as lease_left,
  (select count(*) from {schema}.worker_instance i where i.node_id = n.id) as holds
from {schema}.node n
where n.ended_at is null or $1
order by n.id desc
limit 1000;

-- instance_claim: become an instance of a worker. $1 worker  $2 node  $3 token
select {schema}.claim_worker($1, $2, $3);

-- instance_release: stop being an instance. $1 token
delete from {schema}.worker_instance where token = $1 returning id;
