"""Whole runs in one process: real membership, SMPs and messages; made-up time, network and faults.

The world comes from one seed. Nothing here reads a clock, draws from anywhere but the world's
streams, or goes through a set without sorting it, so a seed is a run: twice the same, everywhere.

    scenario.py    what a seed stands for: nodes, settings, how long, how many faults
    world.py       virtual time, streams of random numbers, the trace
    network.py     connections between agents as TCP has them; links that are slow, cut, one-way
    memory.py      what one node keeps: slots of its ranks, vaults with parts of what others protect
    links.py       links between SMPs, which are reset, cut and refused
    snapshots.py   an SMP: its own code, with time, links and bytes of the simulation
    smp_link.py    what an agent knows of its SMP
    training.py    ranks: a step is made when all ranks of one generation make it
    node.py        a machine, its stub, and an agent process: a real Member, and its hands
    faults.py      what goes wrong, and when
    mishaps.py     clocks, firewalls, threads, ranks that do not die, checkpoints that do not load
    witness.py     the outside witness, and how it fails
    plots.py       sequences of faults that chance hardly ever makes
    invariants.py  what must never be, looked at after every event
    run.py         one seed from beginning to end, and what became of it
    traffic.py     a quiet run with many nodes: what it costs
"""
