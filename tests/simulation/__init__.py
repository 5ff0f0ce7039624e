"""Whole runs in one process: real membership, SMPs, messages; simulated time, network and faults.

One seed determines the world. No module here reads a clock, draws random numbers outside the
streams of the world, or iterates over a set without sorting it. The same seed is the same run on
every machine.

    scenario.py    what a seed determines: nodes, settings, duration, number of faults
    world.py       virtual time, streams of random numbers, the trace
    network.py     connections between agents as TCP has them; links that are slow, cut, one-way
    memory.py      the memory of one node: slots of its ranks, protected parts of other nodes
    links.py       links between SMPs, which are reset, cut and refused
    snapshots.py   an SMP: its own code, with time, links and bytes of the simulation
    smp_link.py    an agent's client of its SMP
    training.py    ranks: a step is made when all ranks of one generation make it
    node.py        a machine, its stub, and an agent process: a real Member and its executor
    faults.py      faults, and when they occur
    mishaps.py     clocks, firewalls, threads, ranks that do not die, checkpoints that do not load
    witness.py     the witness, and how it fails
    plots.py       sequences of faults that random faults rarely produce
    invariants.py  invariants that are checked after every event
    run.py         one seed from beginning to end, and its outcome
    traffic.py     a quiet run with many nodes: its cost
"""
