"""``elastic launch``: starts the ranks of a job on this host, watches them, and starts them again in under a second.

torchelastic stays the engine (its agent loop, its rendezvous). What is different here: ranks are forked from a process
that has imported torch already (``forkserver``), they are watched for hangs as well as for deaths (``beats``,
``watch``), taken down in bounded time (``crew``), and an exit status means something (``verdict``).
Every name that torch calls private is in ``torchelastic``.
"""
