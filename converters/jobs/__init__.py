"""What every long job shares: plan, workspace, worker pool, finalize."""
