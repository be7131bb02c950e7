"""Runs what nobody trusts: code that a model wrote, in a machine of its own.

    recipe.py          the settings
    probe.py           what this machine offers and lacks, for `etude doctor`
    tree.py            which files of the host can be seen inside, and which Python runs there
    seccomp.py         which system calls may be made inside
    limits.py          cgroups v1 and v2, where they can be written
    nest.py            the host's side of the nest: bubblewrap with a process in it that forks sandboxes
    channel.py         frames between the host and a sandbox
    namespace.py       one sandbox (protocols.Sandbox)
    pool.py            warm ones in stock (protocols.SandboxPool)
    memo.py            over a pool: equal runs are answered from one
    inside_*.py        what runs inside; standard library only, because the package is not visible there
    iochecks.py        calls with known answers, asked in a sandbox and compared outside; iorunner.py is its inside

What it does not do: protect against faults of the kernel itself; a virtual machine does that.
"""
