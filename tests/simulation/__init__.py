"""A deterministic simulation of whole runs, with faults.

    python -m tests.simulation --seeds=100000      # until one breaks a promise
    python -m tests.simulation --seed=4711         # all that happens in one

Production code runs as it is, from `all_clusters.connected` down to the
calls of a socket, with its threads, and from `Checkpoints` to the calls of a disk. What
lies below is simulated, in one thread and in virtual time:

    world       the heap of events; tasks, which are greenlets, and processes
    machine     the modules time, threading, queue, select, selectors, socket, ...
    network     lines between hosts, and sockets as Linux has them
    disk        files, and what a power cut leaves of them
    clusters    trainers whose parameters are a hash of every byte they received
    hosts       a machine and its supervisor; strangers; clones
    faults      what a seed draws: a run, and a tape of faults
    simulate    one run, and the promises that are checked in it
    shrink      the shortest tape that still breaks one
    bugs        what is planted in production code, and has to be found

Promises while faults last: every state is the one without faults (nothing lost,
doubled, altered or out of order); no follower is further ahead than the window; queues
and descriptors are bounded; a step that all have saved is not lost; no run begins anew
where there was one; no honest peer is blamed; faults of the line alone end no process.
And after them: the run ends, in time, with every cluster at the last step.

Faults that were found by it before they were mended, at commit 266cb1c, each with a
tape of these kinds alone:

    flip            bits flipped in a tensor went unnoticed (seeds 55, 82, 104);
                    in a head they ended the session, not the connection (4, 10),
                    in the first handshake the process (3)
    damage, crash   a run began anew although a cluster's checkpoints were all damaged
                    (14, 18, 125)
    stick           a peer that pings and computes nothing was waited for (2, 13, 14)
    strangers       Open with epoch 0 left descriptors behind (397, 404);
                    100 silent ones kept a known peer out (353)

Cuts, stalls, half-open connections, kills, lost hosts and pauses broke none there.
Later: a listener restarted after it had acknowledged a Hello, and before its own had
come, was taken for a peer that breaks the protocol (958, at the time).

What is not simulated: TLS, of which only bytes and certificates would be seen; several
hosts of one cluster; damage between the verification of a checkpoint and its reading.
"""
