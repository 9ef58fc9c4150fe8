"""Gates and bisects on many hosts, through an engine that schedules: Ray, or Slurm by submitit."""
