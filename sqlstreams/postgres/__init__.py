"""The store on Postgres: bridge, pool, listener and statements. The driver stays in here."""
