"""Robot arms: kinematics, poses of the end effector, leaders, take-over, and assistance by a second policy.

Nothing else in the client imports this folder. To use an arm or a take-over, import it and pass it to the run as a
robot, a source or a listener.
"""
