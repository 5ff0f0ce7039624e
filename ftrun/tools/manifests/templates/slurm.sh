% set several, machine = job.nodes > 1, job.machine
#!/bin/bash
# Written by ftrun manifest slurm: {{ job.as_text }}.
# Submit it with sbatch. The comment above each line says what happens without it.

# Shown by squeue, and used in file names and in the run id. Without it: the name of this file.
#SBATCH --job-name={{ name }}

# One ftrun on each node starts the ranks of the node. If a node had several tasks, each would be a separate run.
#SBATCH --nodes={{ job.nodes }}
#SBATCH --ntasks-per-node=1

% if machine.cpus is not none
# Without it the single task of a node gets one processor, which all its ranks share.
#SBATCH --cpus-per-task={{ machine.cpus }}

% else
# Whole nodes. Without it the single task of a node gets one processor, which all its ranks share. --cpus N requests a part of each node instead.
#SBATCH --exclusive

% endif
% if machine.gpus
# Without it the ranks see no GPU.
#SBATCH --gpus-per-node={{ machine.gpus }}

% endif
% if job.memory_bytes() is not none
# {{ job.memory_text() }}: snapshots are part of the memory of the job. Without it the default of the site applies, and Slurm kills a job that exceeds it.
#SBATCH --mem={{ memory_mib }}M

% elif machine.cpus is none
# All memory of the nodes. Without it the default of the site applies, which may be less. Snapshots are part of the memory of the job: twice the state of all ranks of a node, and parity.
#SBATCH --mem=0

% endif
% if job.time_s is not none
# Without it the limit of the partition applies.
#SBATCH --time={{ time }}

% endif
% if several
# Without it Slurm ends the whole job when it detects a lost node, although training has already resumed without it.
#SBATCH --no-kill

% endif
# The run takes a final snapshot {{ warning_s }} s before the end of its time and writes a checkpoint: up to {{ "%g"|format(job.grace_s) }} s until ranks are killed, as long again to write, and Slurm may be 60 s late. Without it the job gets SIGTERM and, after KillWait (30 s), SIGKILL. No "B:" before USR1, because every process of the step must get the signal; ranks ignore it.
#SBATCH --signal=USR1@{{ warning_s }}

# Outer safety net: Slurm requeues a job that Slurm itself has ended. The job id and therefore the run id stay the same, and the run resumes from its checkpoint. Without it the job is over. Without append the second start overwrites the output of the first.
#SBATCH --requeue
#SBATCH --open-mode=append

# Output of the batch shell and of srun itself.
#SBATCH --output=%x-%j.out

% for flag in ("partition", "account")
% if place[flag] is not none
# As given. Without it: your default {{ flag }}.
#SBATCH --{{ flag }}={{ place[flag] }}

% endif
% endfor
% if place.directives
# As given.
% for word in place.directives
#SBATCH {{ word }}
% endfor
{{ "" }}
% endif
% if several
# --no-kill, also for the step: a step has its own setting. Without it srun ends the other nodes.
# --kill-on-bad-exit=0: some sites set it to 1, and then one failed task ends all others. All tasks of a run end with the same code anyway.
% endif
# --cpu-bind=none: without it Slurm may bind the task of a node, with all its ranks, to one core.
% if machine.cpus is not none
# --cpus-per-task: since Slurm 22.05 a step does not inherit it from the job.
% endif
# --output: one file for each node. Without it all output goes through srun on the first node. If that node is lost, ranks on other nodes block in print when a pipe is full.
% if not has_run_id
# --run-id: the same for each start of the job, because logs and reports are found by it.
% endif
% if job.checkpoint_directory is none
# No --checkpoint-dir: if the job is requeued, the script resumes from its own checkpoints, if it writes any.
% elif job.shared_directory is none
# --checkpoint-dir: every node sends its own part to the URL, and needs the credentials that its library reads.
% elif several
# --checkpoint-dir: on a file system that all nodes share; each node writes its own part.
% endif
@COMMAND@

code=$?
# 75: a required process or node is lost. 76: too few nodes remain. {{ "137: srun has killed all tasks. It does so in spite of --no-kill if a lost node returns before Slurm has detected the loss; or memory was short. " if several }}138: the time is over. For these codes the job is requeued and resumes from its checkpoint; without it the job is over. Not requeued: 93 and 77, because a restart does not help, and the codes of the script itself. The limit ends a job that fails repeatedly.
case $code in
{{ "75 | 76 | 137 | 138" if several else "75 | 76 | 138" }})
    if [ "${SLURM_RESTART_COUNT:-0}" -lt {{ place.max_requeues }} ]; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
    ;;
esac
# Without it the job counts as successful in any case.
exit $code
