-- Step 1 of an installation: the shared tables. Run once, in one transaction, under the installation's lock.
-- All instants are set and compared through clock(), which tests replace to move time.

create function {schema}.clock() returns timestamptz
  language sql volatile as 'select clock_timestamp()';

create sequence {schema}.fence cache 1;

create table {schema}.migration (
  version int not null,
  works_with int not null,           -- the oldest release of the schema that still works with this step
  applied_at timestamptz not null default {schema}.clock(),
  applied_by text not null,
  primary key (version)
);

-- One server run: crash recovery and promotion empty an unlogged table, a clean restart does not.
create unlogged table {schema}.server_run (
  one bool primary key default true check (one),
  id uuid not null
);

create table {schema}.node (
  id bigint generated always as identity primary key,
  name text not null,
  host text not null,
  pid int not null,
  version text not null,
  started_at timestamptz not null default {schema}.clock(),
  beats bigint not null default 0,
  ttl interval not null,             -- processes may differ: each is judged by its own
  expires_at timestamptz not null,
  ended_at timestamptz,
  token uuid not null,
  backend_pid int not null
) with (fillfactor = 50);            -- a heartbeat updates in place, every few seconds

create index node_live on {schema}.node (expires_at) where ended_at is null;

create table {schema}.stream (
  id bigint generated always as identity primary key,
  name text not null unique,
  partition_size bigint not null,
  config json not null,
  schema_version int not null,
  destroying_at timestamptz,
  created_at timestamptz not null default {schema}.clock(),
  updated_at timestamptz not null default {schema}.clock()
);

create table {schema}.consumer_group (
  id bigint generated always as identity primary key,
  stream_id bigint not null references {schema}.stream,
  name text not null,
  config json not null,
  patterns text[] not null default '{}',
  versions int[] not null default '{}',
  paused_at timestamptz,
  created_at timestamptz not null default {schema}.clock(),
  updated_at timestamptz not null default {schema}.clock(),
  unique (stream_id, name)
);

create table {schema}.group_cursor (
  group_id bigint primary key references {schema}.consumer_group on delete cascade,
  epoch bigint not null default 0,
  ranges_done bigint not null,
  committed bigint not null
) with (fillfactor = 50);

create table {schema}.worker (
  id bigint generated always as identity primary key,
  system bool not null default false,
  stream_id bigint references {schema}.stream on delete cascade,
  group_id bigint references {schema}.consumer_group on delete cascade,
  kind text not null,
  config json not null default '{}',
  target_instances int not null default 1,  -- 0 suspended, n at most n, -1 as many as there are
  failures int not null default 0,
  check (system::int + (stream_id is not null)::int + (group_id is not null)::int = 1),
  unique nulls not distinct (system, stream_id, group_id, kind)
);

create table {schema}.worker_instance (
  id bigint generated always as identity primary key,
  worker_id bigint not null references {schema}.worker on delete cascade,
  node_id bigint not null,
  token uuid not null unique,
  fence bigint not null,
  claimed_at timestamptz not null default {schema}.clock(),
  last_tick_at timestamptz
);

create index worker_instance_worker on {schema}.worker_instance (worker_id);
create index worker_instance_node on {schema}.worker_instance (node_id);

create table {schema}.config_event (
  id bigint generated always as identity primary key,
  at timestamptz not null default {schema}.clock(),
  subject text not null,
  old json,
  new json,
  changed_by text not null
);

-- The library of the claim protocol raises these codes:
--   SQ001 wrong isolation   SQ002 the node has ended   SQ003 a group without claim rows   SQ004 the log's sequence was changed
--   SQ005 no such stream or group   SQ006 another server run   SQ010 the token no longer holds the row

-- Checks that a function of ours runs at READ COMMITTED: several proofs need a snapshot of its own for each statement.
create function {schema}.check_isolation() returns void
  language plpgsql volatile as $$
begin
  if current_setting('transaction_isolation') <> 'read committed' then
    raise exception 'needs READ COMMITTED, not %', upper(current_setting('transaction_isolation')) using errcode = 'SQ001';
  end if;
end $$;

-- Checks that a node may take something: it has not ended, and its lease has not run out while it waited for a lock.
create function {schema}.check_node(node bigint) returns void
  language plpgsql volatile as $$
begin
  if not exists (
    select from {schema}.node n
    where n.id = node and n.ended_at is null and n.expires_at > (select {schema}.clock())
  ) then
    raise exception 'node % has ended', node using errcode = 'SQ002';
  end if;
end $$;

-- Registers a process and ends the node it was before, if that is not held by somebody. One statement for the caller.
create function {schema}.register_node(
  p_name text, p_host text, p_pid int, p_version text, p_ttl interval, p_token uuid, old_node bigint, old_token uuid
) returns bigint
  language plpgsql volatile as $$
declare
  registered bigint;
begin
  if old_node is not null then
    update {schema}.node n
    set ended_at = (select {schema}.clock())
    where n.id = (
      select k.id from {schema}.node k
      where k.id = old_node and k.token = old_token and k.ended_at is null
      for update skip locked
    );
  end if;
  insert into {schema}.node (name, host, pid, version, ttl, expires_at, token, backend_pid)
  values (p_name, p_host, p_pid, p_version, p_ttl, (select {schema}.clock()) + p_ttl, p_token, pg_backend_pid())
  returning id into registered;
  return registered;
end $$;

-- Adds one instance of a worker when fewer than its target run: the row is locked first, the live ones are counted later.
create function {schema}.claim_worker(p_worker bigint, p_node bigint, p_token uuid) returns bigint
  language plpgsql volatile as $$
declare
  target int;
  instance bigint;
begin
  perform {schema}.check_isolation();
  select w.target_instances into target from {schema}.worker w where w.id = p_worker for update skip locked;
  if target is null then
    return null;
  end if;
  if target >= 0 and (
    select count(*) from {schema}.worker_instance i join {schema}.node n on n.id = i.node_id
    where i.worker_id = p_worker and n.ended_at is null
  ) >= target then
    return null;
  end if;
  perform {schema}.check_node(p_node);
  insert into {schema}.worker_instance (worker_id, node_id, token, fence)
  values (p_worker, p_node, p_token, nextval('{schema}.fence'))
  returning id into instance;
  return instance;
end $$;
