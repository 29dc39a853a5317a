"""What a configuration will do, before the machines are free: the product's own packer, planner and schedules, executed
with a cost model instead of devices. Torch-free."""
