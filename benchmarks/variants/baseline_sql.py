"""The statements of the baseline: a partitioned log, a claim log, the fence by locks of writers. One group, no failures."""

from benchmarks.variants.load import PARTITION

__all__ = ["CLAIM", "COMPLETE", "INSERT", "OBSERVE", "READ", "schema"]


def schema(capacity: int) -> str:
    """Return the script that makes the tables, with partitions for that many ids."""
    partitions = "\n".join(
        f"create table bare.log_{k} partition of bare.log (primary key (id)) "
        f"for values from ({k * PARTITION}) to ({(k + 1) * PARTITION});"
        for k in range(capacity // PARTITION + 2)
    )
    return f"""
create schema bare;

create table bare.log (
  id bigserial,
  created_at timestamptz not null default now(),
  schema_version int not null default 1,
  routing_key text,
  message_key text,
  headers json,
  payload json not null
) partition by range (id);

{partitions}

create table bare.claim (
  group_id int not null,
  low bigint not null,
  high bigint not null,
  token uuid not null,
  expires_at timestamptz not null,
  done bool not null default false,
  primary key (group_id, low)
) with (fillfactor = 70);

insert into bare.claim (group_id, low, high, token, expires_at, done)
values (1, -1, 0, gen_random_uuid(), now(), true);

create function bare.take(grp int, most int, settled bigint, out low bigint, out high bigint, out token uuid)
  returns setof record language plpgsql as $$
declare
  newest bigint;
begin
  perform pg_advisory_xact_lock(20250, grp);
  select c.high into newest from bare.claim c where c.group_id = grp order by c.low desc limit 1;
  if newest >= settled then
    return;
  end if;
  return query
    insert into bare.claim as c (group_id, low, high, token, expires_at)
    values (grp, newest, least(newest + most, settled), gen_random_uuid(), clock_timestamp() + interval '15 s')
    returning c.low, c.high, c.token;
end $$;
"""


INSERT = "insert into bare.log (payload) select p from unnest($1::json[]) as u (p) returning id"

# The head first, then those who hold the lock that a writer takes before it draws an id.
OBSERVE = """
with h as materialized (select coalesce(pg_sequence_last_value('bare.log_id_seq'), 0) as head)
select h.head, l.writers
from h cross join lateral (
  select coalesce(array_agg(k.virtualtransaction), '{}') as writers
  from pg_locks k
  where h.head is not null and k.locktype = 'relation' and k.mode = 'RowExclusiveLock' and k.granted
    and k.relation = 'bare.log'::regclass
    and k.database = (select d.oid from pg_database d where d.datname = current_database())
) l
"""

CLAIM = "select low, high, token from bare.take(1, $1, $2)"

READ = """
select id, payload, schema_version, created_at, message_key, routing_key, headers
from bare.log where id > $1 and id <= $2 order by id
"""

COMPLETE = "update bare.claim set done = true where group_id = 1 and low = $1 and token = $2 and not done"
