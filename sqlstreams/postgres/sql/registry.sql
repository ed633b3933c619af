-- installed: whether the installation is there. Read as a table: a name that was looked up in vain before the wait for
-- install_lock may still be remembered as absent after it, and to_regclass would say so. $1 schema
select exists (
  select from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
  where n.nspname = $1::text and c.relname = 'migration');

-- install_lock: one installer at a time, before there is a table whose oid could name the lock. $1 schema
select pg_advisory_xact_lock(hashtextextended('sqlstreams installation ' || $1::text, 0));

-- create_schema: the schema of this installation.
create schema if not exists {schema};

-- versions: how far the schema is, and the oldest release of it that still works with it.
select coalesce(max(version), 0) as version, coalesce(max(works_with), 0) as works_with from {schema}.migration;

-- add_migration: note a finished step. $1 version  $2 works with  $3 by whom
insert into {schema}.migration (version, works_with, applied_by) values ($1, $2, $3);

-- registry_lock: one declaration at a time.
select pg_advisory_xact_lock('{schema}.stream'::regclass::oid::int, 0);

-- stream_lock: keep retention, seek and registration of groups of one stream apart. Not the lock of ATTACH.
select pg_advisory_xact_lock('{schema}.message_log_{stream}'::regclass::oid::int, 2);

-- stream_by_name: one stream. $1 name
select id, name, partition_size, config, schema_version, destroying_at, created_at, updated_at from {schema}.stream where name = $1;

-- stream_by_id: one stream. $1 id
select id, name, partition_size, config, schema_version, destroying_at, created_at, updated_at from {schema}.stream where id = $1;

-- stream_list: all streams by name.
select id, name, partition_size, config, schema_version, destroying_at, created_at, updated_at
from {schema}.stream where destroying_at is null order by name;

-- stream_add: declare a stream. $1 name  $2 partition size  $3 config  $4 schema version
insert into {schema}.stream (name, partition_size, config, schema_version) values ($1, $2, $3, $4)
returning id, name, partition_size, config, schema_version, destroying_at, created_at, updated_at;

-- stream_change: replace a declaration. $1 id  $2 config
update {schema}.stream set config = $2, updated_at = (select {schema}.clock()) where id = $1
returning id, name, partition_size, config, schema_version, destroying_at, created_at, updated_at;

-- stream_rename: give a stream another name. $1 id  $2 name
update {schema}.stream set name = $2, updated_at = (select {schema}.clock()) where id = $1 and destroying_at is null returning id;

-- stream_doom: from now on the stream counts as gone. $1 id
update {schema}.stream set destroying_at = coalesce(destroying_at, (select {schema}.clock())) where id = $1 returning id;

-- stream_delete: the last step of destroying a stream. $1 id
delete from {schema}.stream where id = $1;

-- stream_is_empty: whether a log holds no message.
select not exists (select from {schema}.message_log_{stream});

-- drop_partition: drop partition $1 of a stream that is being destroyed; the statement is completed by the caller.
drop table if exists {schema}.message_log_{stream}_{partition};

-- drop_stream: everything of a stream but its partitions, which are gone by now.
drop table if exists {schema}.message_log_{stream}, {schema}.claim_{stream}, {schema}.exception_queue_{stream},
  {schema}.delivery_log_{stream};
drop function if exists {schema}.make_partition_{stream}(bigint, bigint),
  {schema}.claim_range_{stream}(bigint, bigint, bigint, uuid, bigint, uuid),
  {schema}.reclaim_range_{stream}(bigint, bigint, uuid, bigint, int, int[], bool),
  {schema}.record_range_{stream}(bigint, bigint, uuid, bigint, text, bigint, bigint, bigint[], text[], int[], int[], interval[],
    text[], text[], int[], bigint[], int[], text[], text[]),
  {schema}.claim_exceptions_{stream}(bigint, bigint, uuid, int[], int, int, bool),
  {schema}.record_exception_{stream}(bigint, bigint, uuid, text, int, int, interval, text, bigint, int, text);
delete from {schema}.consumer_group where stream_id = {stream};

-- group_by_name: one group of a stream. $1 stream id  $2 name
select g.id, g.stream_id, g.name, g.config, g.versions, g.paused_at, g.created_at, g.updated_at, c.epoch,
  (select w.id from {schema}.worker w where w.group_id = g.id and w.kind = 'range_consumer') as worker_id
from {schema}.consumer_group g join {schema}.group_cursor c on c.group_id = g.id
where g.stream_id = $1 and g.name = $2;

-- group_by_id: one group. $1 id
select g.id, g.stream_id, g.name, g.config, g.versions, g.paused_at, g.created_at, g.updated_at, c.epoch,
  (select w.id from {schema}.worker w where w.group_id = g.id and w.kind = 'range_consumer') as worker_id
from {schema}.consumer_group g join {schema}.group_cursor c on c.group_id = g.id
where g.id = $1;

-- group_list: the groups of a stream by name. $1 stream id
select g.id, g.stream_id, g.name, g.config, g.versions, g.paused_at, g.created_at, g.updated_at, c.epoch,
  (select w.id from {schema}.worker w where w.group_id = g.id and w.kind = 'range_consumer') as worker_id
from {schema}.consumer_group g join {schema}.group_cursor c on c.group_id = g.id
where g.stream_id = $1 order by g.name;

-- group_add: declare a group. $1 stream id  $2 name  $3 config
insert into {schema}.consumer_group (stream_id, name, config) values ($1, $2, $3) returning id;

-- group_start: the id that a group at the beginning starts above: below everything that a partition could still show.
select greatest(coalesce(min(substring(c.relname from '[0-9]+$')::bigint), 0) * $1::bigint - 1, 0)
from pg_inherits i
join pg_class c on c.oid = i.inhrelid
where i.inhparent = '{schema}.message_log_{stream}'::regclass and not i.inhdetachpending;

-- group_sentinel: a group's first range is a done one that ends where it starts. $1 group  $2 start
insert into {schema}.claim_{stream} (group_id, low, high, done) values ($1, $2 - 1, $2, true);

-- group_cursor_add: a group's marks. $1 group  $2 start
insert into {schema}.group_cursor (group_id, ranges_done, committed) values ($1, $2, $2);

-- group_worker_add: what consumers of the group are instances of; as many as there are. $1 group
insert into {schema}.worker (group_id, kind, target_instances) values ($1, 'range_consumer', -1);

-- same_run: whether this is still the server run that a head was observed on. $1 server run
select exists (select from {schema}.server_run r where r.id = $1);

-- group_change: replace a declaration. $1 id  $2 config
update {schema}.consumer_group set config = $2, updated_at = (select {schema}.clock()) where id = $1 returning id;

-- group_live: how many instances of a group's consumer live. $1 group
select count(*) from {schema}.worker_instance i
join {schema}.worker w on w.id = i.worker_id
join {schema}.node n on n.id = i.node_id
where w.group_id = $1 and n.ended_at is null;

-- group_wipe: everything of one group. The claims go first: then nobody can record any more.
with claims as (delete from {schema}.claim_{stream} where group_id = $1)
delete from {schema}.consumer_group where id = $1 returning id;

-- group_wipe_rest: the group's exceptions, in a later statement than its claims. $1 group
delete from {schema}.exception_queue_{stream} where group_id = $1;

-- group_wipe_history: the group's history. $1 group
delete from {schema}.delivery_log_{stream} where group_id = $1;

-- config_changed: note a changed declaration. $1 subject  $2 old  $3 new
insert into {schema}.config_event (subject, old, new, changed_by)
values ($1, $2, $3, current_user || ' (' || current_setting('application_name') || ')');

-- ring: wake whoever listens. $1 channel  $2 what for
select pg_notify($1, $2);

-- group_pause: from the commit on nothing new is handed out. One row when it changed. $1 group
update {schema}.consumer_group set paused_at = (select {schema}.clock()), updated_at = (select {schema}.clock())
where id = $1 and paused_at is null returning id;

-- group_resume: hand out again. One row when it changed. $1 group
update {schema}.consumer_group set paused_at = null, updated_at = (select {schema}.clock())
where id = $1 and paused_at is not null returning id;
