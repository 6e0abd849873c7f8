"""Offline batch: a file of requests in, a file of results out, and nothing lost in between.

    INPUT ─► survey (digest, count, duplicate ids) ─► run: read, submit, step, append ─► OUT.partial ─► finish ─► OUT

Whatever stops a job (a signal, SIGKILL, a full disk), the same command goes on where it stopped: OUT.partial holds
every finished result, and OUT.job.json says what job they belong to.
"""
