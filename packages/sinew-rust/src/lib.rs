//! A client of a Sinew server. It sends observations and receives chunks of actions, over the native protocol: Protobuf
//! messages over ZMTP 3. The crate has no dependencies and no `unsafe` code.
//!
//! A [`Client`] sends one request and waits for its reply, with a time limit. A [`Stream`] sends samples and reads
//! windows, and never waits for the server.
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
#[allow(dead_code)] // the module has all fields of the messages, but the client does not use all of them
#[rustfmt::skip]
mod schema;
mod stream;
mod types;
mod zmtp;

pub use client::Client;
pub use error::{Error, Result};
pub use stream::Stream;
pub use types::{Chunk, Image, Observation, Options, Pixels, Report, Timing, Window};
