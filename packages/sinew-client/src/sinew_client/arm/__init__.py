"""Robot arms: kinematics, poses of the end effector, leaders, take-over, and assistance by a second policy.

The rest of the client does not import this package. To use an arm or a take-over, import its class and pass an instance
to the run as a robot, a source or a listener.
"""
