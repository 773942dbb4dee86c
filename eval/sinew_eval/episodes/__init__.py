"""Episodes: what plays them, one or many, what is played, and the policy and the robot in them."""
