"""Arms, and the people and policies beside them: kinematics, poses of the end effector, leaders, take-over, assist.

Nothing else in the client imports this folder. Who wants an arm or a take-over imports it and hands it to the run, as a
robot, as a source or as listeners of the loop.
"""
