//! Asks a Sinew server for a robot's actions, over its native wire: Protobuf messages over ZMTP 3 on plain sockets. No
//! dependency and no `unsafe`; one request, one reply, a time limit on each; or a stream, which waits for nothing.
//!
//! ```no_run
//! use sinew_client::{Client, Image, Observation};
//!
//! # fn main() -> Result<(), sinew_client::Error> {
//! let pixels = vec![0_u8; 480 * 640 * 3];
//! let mut robot = Client::connect("tcp://127.0.0.1:5555")?;
//! let seen = Observation {
//!     images: vec![Image::rgb("front", &pixels, 480, 640)],
//!     state: vec![0.0; 6],
//!     prompt: "pick up the red cube".into(),
//!     ..Observation::default()
//! };
//! let chunk = robot.infer(&seen)?;
//! for row in chunk.iter() {
//!     println!("{row:?}");
//! }
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod client;
mod error;
pub mod messages;
mod protobuf;
#[allow(dead_code)] // it has every field of a message, and a client does not send all
#[rustfmt::skip]
mod schema;
mod stream;
mod types;
mod zmtp;

pub use client::Client;
pub use error::{Error, Result};
pub use stream::Stream;
pub use types::{Chunk, Image, Observation, Options, Pixels, Report, Timing, Window};
