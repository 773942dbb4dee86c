"""The protocol of LeRobot's asynchronous RobotClient."""
