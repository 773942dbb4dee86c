"""Write LeRobot data sets from episodes that a policy or an expert plays, and from requests that a server recorded."""
