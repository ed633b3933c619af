"""The programs that are measured, each run in a process of its own. This file and `load` import no variant's libraries."""
