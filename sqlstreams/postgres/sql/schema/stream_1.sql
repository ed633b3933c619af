-- Step 1 of a stream: its own tables and functions, named after its id, so that retention, churn and drop never touch another.

create sequence {schema}.message_log_{stream}_id cache 1;

create table {schema}.message_log_{stream} (
  id bigint not null default nextval('{schema}.message_log_{stream}_id'),
  created_at timestamptz not null default {schema}.clock(),
  schema_version int not null default 1,
  routing_key text,
  message_key text,
  compaction_rank bigint,
  headers json,
  payload json not null,
  options json,
  primary key (id)
) partition by range (id);

create index message_log_{stream}_key on {schema}.message_log_{stream} (message_key, id) where message_key is not null;

alter sequence {schema}.message_log_{stream}_id owned by {schema}.message_log_{stream}.id;

-- The claim log: a row for each range (low, high] that was handed out; the newest is the group's cursor.
create table {schema}.claim_{stream} (
  group_id bigint not null,
  low bigint not null,
  high bigint not null,
  token uuid,
  fence bigint,
  node_id bigint,
  claimed_at timestamptz not null default {schema}.clock(),
  done_through bigint,
  done bool not null default false,
  reclaims int not null default 0,
  primary key (group_id, low),
  check (low < high)
) with (fillfactor = 70);            -- room for the update that completes a range

create table {schema}.exception_queue_{stream} (
  group_id bigint not null,
  message_id bigint not null,
  status text not null check (status in ('ready', 'inflight', 'deferred', 'parked', 'dead', 'superseded')),
  message_key text,
  concurrency text,
  schema_version int not null default 1,
  attempts int not null default 0,
  delays int not null default 0,
  can_run_after timestamptz not null default {schema}.clock(),
  last_error text,
  token uuid,
  fence bigint,
  node_id bigint,
  created_at timestamptz not null default {schema}.clock(),
  updated_at timestamptz not null default {schema}.clock(),
  primary key (group_id, message_id)
) with (fillfactor = 80);

-- Partial, so that a million dead letters cost nothing.
create index exception_queue_{stream}_unresolved on {schema}.exception_queue_{stream} (group_id, message_id)
  where status in ('ready', 'inflight', 'deferred', 'parked');
create index exception_queue_{stream}_due on {schema}.exception_queue_{stream} (group_id, can_run_after)
  where status in ('ready', 'inflight', 'deferred');
create index exception_queue_{stream}_parked on {schema}.exception_queue_{stream} (group_id, schema_version, message_id)
  where status = 'parked';
create index exception_queue_{stream}_dead on {schema}.exception_queue_{stream} (group_id, message_id)
  where status = 'dead';

create table {schema}.delivery_log_{stream} (
  group_id bigint not null,
  message_id bigint not null,
  attempt int not null,
  status text not null,
  error text,
  node_id bigint,
  at timestamptz not null default {schema}.clock()
);

create index delivery_log_{stream}_message on {schema}.delivery_log_{stream} (group_id, message_id);

-- Makes partition k, [k * size, (k + 1) * size): a plain table, then ATTACH with a matching CHECK, which never queues behind a
-- producer's transaction. Returns whether this call made it.
create function {schema}.make_partition_{stream}(k bigint, size bigint) returns bool
  language plpgsql volatile as $$
declare
  leaf text := format('message_log_{stream}_%s', k);
  bounds text := format('id >= %s and id < %s', k * size, (k + 1) * size);
begin
  perform set_config('lock_timeout', '2s', true);
  perform pg_advisory_xact_lock('{schema}.message_log_{stream}'::regclass::oid::int, 1);
  if to_regclass(format('{schema}.%I', leaf)) is not null then
    return false;
  end if;
  execute format(
    'create table {schema}.%I (like {schema}.message_log_{stream} including constraints including indexes including storage,'
    ' constraint %I check (%s))', leaf, leaf || '_bounds', bounds);
  execute format(
    'alter table {schema}.message_log_{stream} attach partition {schema}.%I for values from (%s) to (%s)',
    leaf, k * size, (k + 1) * size);
  execute format('alter table {schema}.%I drop constraint %I', leaf, leaf || '_bounds');
  return true;
end $$;

-- Appends the group's next range. The lock comes first, so every later statement has a snapshot younger than it. The first id
-- above low is looked up with a literal: then partitions are pruned at planning.
create function {schema}.claim_range_{stream}(
  grp bigint, lim bigint, settled bigint, run uuid, node bigint, tok uuid,
  out low bigint, out high bigint, out fence bigint, out empty bool
) returns setof record
  language plpgsql volatile as $$
declare
  newest bigint;
  first_id bigint;
  upto bigint;
begin
  perform {schema}.check_isolation();
  perform pg_advisory_xact_lock('{schema}.claim_{stream}'::regclass::oid::int, grp::int);
  if not exists (select from {schema}.server_run r where r.id = run) then
    raise exception 'observed on another server run' using errcode = 'SQ006';
  end if;
  if exists (select from {schema}.consumer_group g where g.id = grp and g.paused_at is not null) then
    return;
  end if;
  perform {schema}.check_node(node);
  if (select s.seqcache from pg_sequence s where s.seqrelid = '{schema}.message_log_{stream}_id'::regclass) <> 1 then
    raise exception 'sequence message_log_{stream}_id has a CACHE other than 1' using errcode = 'SQ004';
  end if;
  select c.high into newest from {schema}.claim_{stream} c where c.group_id = grp order by c.low desc limit 1;
  if newest is null then
    raise exception 'group % has no claim rows', grp using errcode = 'SQ003';
  end if;
  if newest >= settled then
    return;
  end if;
  execute format('select id from {schema}.message_log_{stream} where id > %s order by id limit 1', newest) into first_id;
  -- a hole that is wider than the limit is a range of its own: one claim, however wide (LEAST ignores null: nothing is there)
  upto := least(settled, case when first_id <= newest + lim then newest + lim else first_id - 1 end);
  empty := first_id is null or first_id > upto;
  -- an empty range is done at once: nobody has to own it
  return query
    insert into {schema}.claim_{stream} as c (group_id, low, high, token, fence, node_id, done)
    values (grp, newest, upto, tok, nextval('{schema}.fence'), case when not empty then node end, empty)
    returning c.low, c.high, c.fence, c.done;
end $$;

-- Takes over the lowest range whose owner has ended, or that was handed back. A range that has killed too many owners is cut into
-- single messages instead: each becomes an exception with a budget of its own.
create function {schema}.reclaim_range_{stream}(
  grp bigint, node bigint, tok uuid, mark bigint, max_reclaims int, reads int[], park bool,
  out low bigint, out high bigint, out start_above bigint, out fence bigint, out reclaims int, out quarantined int
) returns setof record
  language plpgsql volatile as $$
begin
  perform {schema}.check_isolation();
  if exists (select from {schema}.consumer_group g where g.id = grp and g.paused_at is not null) then
    return;
  end if;
  perform {schema}.check_node(node);
  update {schema}.claim_{stream} c
  set token = tok, node_id = node, fence = nextval('{schema}.fence'), claimed_at = (select {schema}.clock()),
    reclaims = c.reclaims + (c.node_id is not null)::int
  where (c.group_id, c.low) = (
    select k.group_id, k.low from {schema}.claim_{stream} k
    where k.group_id = grp and k.low >= mark and not k.done
      and (k.node_id is null or exists (select from {schema}.node n where n.id = k.node_id and n.ended_at is not null))
    order by k.low limit 1 for update of k skip locked)
  returning c.low, c.high, greatest(c.low, c.done_through), c.fence, c.reclaims
  into low, high, start_above, fence, reclaims;
  if low is null then
    return;
  end if;
  if reclaims >= max_reclaims then
    execute format(
      'insert into {schema}.exception_queue_{stream} as e (group_id, message_id, status, message_key, schema_version, last_error)'
      ' select $1, m.id, case when m.schema_version = any($2) then ''ready'' else ''parked'' end, m.message_key, m.schema_version,'
      ' ''its range lost '' || $3 || '' owners''  from {schema}.message_log_{stream} m'
      ' where m.id > %s and m.id <= %s and (m.schema_version = any($2) or $4)'
      ' on conflict (group_id, message_id) do update set status = excluded.status, attempts = 0, delays = 0,'
      ' can_run_after = (select {schema}.clock()), last_error = excluded.last_error, token = null, fence = null, node_id = null,'
      ' updated_at = (select {schema}.clock()) where e.status in (''dead'', ''superseded'')', start_above, high)
    using grp, reads, reclaims, park;
    get diagnostics quarantined = row_count;
    update {schema}.claim_{stream} c set done = true, node_id = null, done_through = c.high
    where c.group_id = grp and c.low = reclaim_range_{stream}.low and c.token = tok;
  end if;
  return next;
end $$;

-- Records what became of a range, or of a resolved prefix of it: the claim row first, guarded by its token, then exceptions and
-- history. Answers 'recorded'; 'already' when this very call had committed and only its answer was lost. Anything else: SQ010.
create function {schema}.record_range_{stream}(
  grp bigint, lo bigint, tok uuid, seen_epoch bigint, action text, through bigint, node bigint,
  ids bigint[], statuses text[], attempts int[], delays int[], waits interval[], errors text[], keys text[], versions int[],
  log_ids bigint[], log_attempts int[], log_statuses text[], log_errors text[]
) returns text
  language plpgsql volatile as $$
declare
  seen record;
  written int;
begin
  if action = 'finish' then
    update {schema}.claim_{stream} c set done = true, node_id = null
    where c.group_id = grp and c.low = lo and c.token = tok and not c.done;
  elsif action = 'progress' then
    update {schema}.claim_{stream} c set done_through = through
    where c.group_id = grp and c.low = lo and c.token = tok and not c.done and coalesce(c.done_through, c.low) < through;
  else
    update {schema}.claim_{stream} c
    set done_through = greatest(coalesce(c.done_through, c.low), through), node_id = null, token = null
    where c.group_id = grp and c.low = lo and c.token = tok and not c.done;
  end if;
  if not found then
    select c.done, c.token, c.node_id, c.done_through into seen
    from {schema}.claim_{stream} c where c.group_id = grp and c.low = lo;
    if not found then
      -- a done row that the clean-up deleted; after a seek the epoch differs
      if action = 'finish' and exists (
        select from {schema}.group_cursor g where g.group_id = grp and g.epoch = seen_epoch
      ) then
        return 'already';
      end if;
    elsif (action = 'finish' and seen.done and seen.token = tok)
      or (action = 'progress' and seen.token = tok and seen.done_through >= through)
      or (action = 'hand back' and not seen.done and seen.token is null and seen.node_id is null
          and seen.done_through >= through) then
      return 'already';
    end if;
    raise exception 'the range above % of group % is held under another token', lo, grp using errcode = 'SQ010';
  end if;
  if cardinality(ids) > 0 then
    insert into {schema}.exception_queue_{stream} as e
      (group_id, message_id, status, attempts, delays, can_run_after, last_error, message_key, schema_version)
    select grp, u.id, u.status, u.attempts, u.delays, (select {schema}.clock()) + coalesce(u.wait, interval '0'), u.error,
      u.key, u.version
    from unnest(ids, statuses, attempts, delays, waits, errors, keys, versions)
      as u (id, status, attempts, delays, wait, error, key, version)
    on conflict (group_id, message_id) do update
    set status = excluded.status, attempts = excluded.attempts, delays = excluded.delays,
      can_run_after = excluded.can_run_after, last_error = excluded.last_error, token = null, fence = null, node_id = null,
      created_at = (select {schema}.clock()), updated_at = (select {schema}.clock())
    where e.status in ('dead', 'superseded');  -- left from before a seek
    get diagnostics written = row_count;
    if written <> cardinality(ids) then
      raise exception 'group %: % of % exceptions were there already', grp, cardinality(ids) - written, cardinality(ids)
        using errcode = 'SQ010';
    end if;
  end if;
  if cardinality(log_ids) > 0 then
    insert into {schema}.delivery_log_{stream} (group_id, message_id, attempt, status, error, node_id)
    select grp, u.id, u.attempt, u.status, u.error, node
    from unnest(log_ids, log_attempts, log_statuses, log_errors) as u (id, attempt, status, error);
  end if;
  return 'recorded';
end $$;

-- Hands out exceptions that are due: first those whose owner died (that costs an attempt), then ready, deferred and readable parked
-- ones. A row beyond its budget becomes dead here, without a run.
create function {schema}.claim_exceptions_{stream}(
  grp bigint, node bigint, tok uuid, reads int[], max_retries int, lim int, keep_history bool
) returns table (message_id bigint, status text, attempts int, delays int, fence bigint)
  language plpgsql volatile as $$
declare
  taken int;
begin
  perform {schema}.check_isolation();
  if exists (select from {schema}.consumer_group g where g.id = grp and g.paused_at is not null) then
    return;
  end if;
  perform {schema}.check_node(node);
  update {schema}.exception_queue_{stream} e
  set status = 'ready', can_run_after = (select {schema}.clock()), updated_at = (select {schema}.clock())
  where (e.group_id, e.message_id) in (
    select k.group_id, k.message_id from {schema}.exception_queue_{stream} k
    where k.group_id = grp and k.status = 'parked' and k.schema_version = any(reads)
    limit lim for update of k skip locked);
  return query
    with picked as (
      select k.group_id, k.message_id from {schema}.exception_queue_{stream} k
      join {schema}.node n on n.id = k.node_id
      where k.group_id = grp and k.status = 'inflight' and n.ended_at is not null and k.schema_version = any(reads)
      order by k.message_id limit lim
      for update of k skip locked
    ),
    moved as (
      update {schema}.exception_queue_{stream} e
      set attempts = e.attempts + 1,
        status = case when e.attempts + 1 - e.delays > max_retries then 'dead' else 'inflight' end,
        last_error = case when e.attempts + 1 - e.delays > max_retries
          then coalesce(e.last_error, 'its owner died while it ran') else e.last_error end,
        token = case when e.attempts + 1 - e.delays > max_retries then null else tok end,
        node_id = case when e.attempts + 1 - e.delays > max_retries then null else node end,
        fence = nextval('{schema}.fence'), updated_at = (select {schema}.clock())
      from picked p
      where e.group_id = p.group_id and e.message_id = p.message_id
      returning e.message_id, e.status, e.attempts, e.delays, e.fence
    ),
    logged as (
      insert into {schema}.delivery_log_{stream} (group_id, message_id, attempt, status, error, node_id)
      select grp, m.message_id, m.attempts - 1, case m.status when 'dead' then 'dead' else 'expired' end,
        'its owner died while it ran', node
      from moved m
      where keep_history
    )
    select m.message_id, m.status, m.attempts, m.delays, m.fence from moved m;
  get diagnostics taken = row_count;
  return query
    with picked as (
      select k.group_id, k.message_id from {schema}.exception_queue_{stream} k
      where k.group_id = grp and k.status in ('ready', 'deferred') and k.can_run_after <= (select {schema}.clock())
        and k.schema_version = any(reads)
      order by k.can_run_after limit greatest(lim - taken, 0)
      for update of k skip locked
    ),
    moved as (
      update {schema}.exception_queue_{stream} e
      set status = case when e.attempts - e.delays > max_retries then 'dead' else 'inflight' end,
        token = case when e.attempts - e.delays > max_retries then null else tok end,
        node_id = case when e.attempts - e.delays > max_retries then null else node end,
        fence = nextval('{schema}.fence'), updated_at = (select {schema}.clock())
      from picked p
      where e.group_id = p.group_id and e.message_id = p.message_id
      returning e.message_id, e.status, e.attempts, e.delays, e.fence
    )
    select m.message_id, m.status, m.attempts, m.delays, m.fence from moved m;
end $$;

-- Records what became of one exception, guarded by its token: 'done' deletes the row, everything else writes the new state.
create function {schema}.record_exception_{stream}(
  grp bigint, mid bigint, tok uuid, new_status text, new_attempts int, new_delays int, wait interval, error text, node bigint,
  log_attempt int, log_status text
) returns void
  language plpgsql volatile as $$
begin
  if new_status = 'done' then
    delete from {schema}.exception_queue_{stream} e where e.group_id = grp and e.message_id = mid and e.token = tok;
  else
    update {schema}.exception_queue_{stream} e
    set status = new_status, attempts = new_attempts, delays = new_delays, last_error = coalesce(error, e.last_error),
      can_run_after = (select {schema}.clock()) + coalesce(wait, interval '0'), token = null, node_id = null,
      updated_at = (select {schema}.clock())
    where e.group_id = grp and e.message_id = mid and e.token = tok;
  end if;
  if not found then
    raise exception 'message % of group % is held under another token', mid, grp using errcode = 'SQ010';
  end if;
  if log_status is not null then
    insert into {schema}.delivery_log_{stream} (group_id, message_id, attempt, status, error, node_id)
    values (grp, mid, log_attempt, log_status, error, node);
  end if;
end $$;
