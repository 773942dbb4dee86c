"""The wire of LeRobot's asynchronous RobotClient."""
