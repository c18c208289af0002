#!/bin/bash
# Written by w5xde launch slurm.
#   bash @@file               the coordinator and @@workers workers
#   bash @@file grow 8        8 more workers, while it runs; scancel ends one
# The run directory must lie on a disk that all nodes see. Partition, account and time limit: SBATCH_PARTITION,
# SBATCH_ACCOUNT and SBATCH_TIMELIMIT in the environment.
set -u
unset -v @@dropped # settings of who launches, which sbatch passes on; the run's are below
name=@@name
workers=@@worker_jobs # no other run's have this name, not those of one of the same name in another directory
run=@@run_dir

submit() {
  sbatch --requeue --open-mode=append --ntasks=1 --mem=@@{megabytes}M "$@"
}

# Told to go (a signal before the time limit, or where it is preempted): exit code 75, and Slurm has it in its queue
# again. One task of an array has the whole array's number as its job's.
again() {
  if [ "$1" -eq @@drained ]; then
    scontrol requeue "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
  fi
  exit "$1"
}

grow() {
  submit --job-name="$workers" --cpus-per-task=@@cpus@@gpus --array="1-$1" --signal=@@worker_signal \
    --output="${run//%/%%}/worker-%A-%a.log" "$script" worker
}

script=$0
case ${1:-submit} in
submit)
  (umask 077 && mkdir -p "$run") # parameters and secrets lie there
  submit --job-name="$name" --cpus-per-task=1 --signal=@@coordinator_signal --output="${run//%/%%}/coordinator.log" "$script" coordinator || exit
  grow @@workers
  ;;
grow)
  grow "$2"
  ;;
coordinator)
  srun --ntasks=1 @@coordinator
  code=$?
  if [ "$code" -ne @@drained ]; then # it is over: who has not heard that from it would look for it in vain
    scancel --quiet --user="$(id -un)" --name="$workers" --state=PENDING
    sleep @@goodbye_s
    scancel --quiet --user="$(id -un)" --name="$workers"
  fi
  again "$code"
  ;;
worker)
  srun --ntasks=1 --cpus-per-task=@@cpus @@worker
  again $?
  ;;
esac
