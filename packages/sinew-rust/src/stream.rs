//! Streams to one server.

use std::time::{Duration, Instant};

use crate::client::{split, LONGEST};
use crate::messages::{self, Pace};
use crate::zmtp::{Connection, Place};
use crate::{Error, Observation, Options, Result, Window};

const MAX_UNSENT: usize = 4; // messages; further ones would be old when they leave
const LINGER: Duration = Duration::from_millis(50); // that the end of a stream may take to leave

/// Streams to one server: samples and frames go out, windows come in (docs/stream.md). After
/// [`Error::ConnectionLost`] or [`Error::BadReply`] the next sample opens another connection and begins anew; after an
/// error of the server the stream stands.
pub struct Stream {
    options: Options,
    place: Place,
    policy: String,
    pace: Pace,
    session: String,
    last_id: u64,
    ended: u64, // the last message of the stream before
    connection: Option<Connection>,
}

impl Stream {
    /// Make a stream of `rate` nodes per second to an address of [`Client`](crate::Client)'s. Nothing is sent yet.
    /// `interpolation`: "", `linear` or `hold`, between the rows of an ordinary checkpoint's chunks.
    ///
    /// # Errors
    /// [`Error::BadAddress`].
    pub fn new(address: &str, rate: f32, options: Options, interpolation: &str) -> Result<Self> {
        let (place, policy) = split(address, &options)?;
        let pace = Pace { rate, frame_time: None, interpolation: interpolation.into() };
        Ok(Self { options, place, policy, pace, session: String::new(), last_id: 0, ended: 0, connection: None })
    }

    /// Connect, where no connection stands, within the time limit. [`Stream::send`] does it too.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::ConnectionLost`].
    pub fn open(&mut self) -> Result<()> {
        if self.connection.is_none() {
            let end = Instant::now() + self.options.timeout.min(LONGEST);
            self.connection = Some(Connection::open(&self.place, end, "DEALER")?);
        }
        Ok(())
    }

    /// Send a sample with the frames that are new, or none; false, and nothing is sent, where four messages have not
    /// left. Waits for nothing once the connection stands. Of `sample` `time` is wanted, seconds of the robot's clock;
    /// `delay` counts nodes from its own to the first that the answer can still reach (1 if absent). `frame_time`: when
    /// the frames were exposed, `time` if absent.
    ///
    /// # Errors
    /// [`Error::BadObservation`], [`Error::Timeout`], [`Error::ConnectionLost`].
    pub fn send(&mut self, sample: &Observation<'_>, frame_time: Option<f64>) -> Result<bool> {
        self.pace.frame_time = frame_time;
        let request =
            messages::encode_sample(sample, &self.pace, self.last_id + 1, &self.options.api_key, &self.policy)?;
        self.open()?;
        let sent = self.with(|connection| {
            connection.flush()?;
            let free = connection.unsent() < MAX_UNSENT;
            if free {
                connection.put(&request)?;
            }
            Ok(free)
        })?;
        if sent {
            self.last_id += 1;
            self.session.clone_from(&sample.session);
        }
        Ok(sent)
    }

    /// Return the next window of this stream, `None` where none has come within `wait`.
    ///
    /// # Errors
    /// [`Error::Server`], [`Error::ConnectionLost`], [`Error::BadReply`], [`Error::UnsafeChunk`].
    pub fn next_window(&mut self, wait: Duration) -> Result<Option<Window>> {
        if self.connection.is_none() {
            return Ok(None);
        }
        let (end, ended, options) = (Instant::now() + wait.min(LONGEST), self.ended, self.options.clone());
        self.with(|connection| {
            while let Some(message) = connection.get(end)? {
                if let Some(window) = messages::decode_window(&message, ended, &options)? {
                    return Ok(Some(window));
                }
            }
            Ok(None)
        })
    }

    /// End it: no window of what was sent before is returned, and the next sample begins another stream that knows
    /// nothing of this one.
    ///
    /// # Errors
    /// [`Error::ConnectionLost`].
    pub fn end(&mut self) -> Result<()> {
        if self.connection.is_none() || self.ended == self.last_id {
            return Ok(());
        }
        self.ended = self.last_id;
        let message = messages::encode_end(&self.session, &self.options.api_key);
        self.with(|connection| connection.put(&message))
    }

    fn with<T>(&mut self, call: impl FnOnce(&mut Connection) -> Result<T>) -> Result<T> {
        let Some(connection) = &mut self.connection else {
            return Err(Error::ConnectionLost("expected a connection, got none".into()));
        };
        let done = call(connection);
        if matches!(done, Err(Error::ConnectionLost(_) | Error::BadReply(_))) {
            self.connection = None;
        }
        done
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let end = Instant::now() + LINGER;
        let mut goes_on = self.end().is_ok();
        while let Some(connection) = self.connection.as_mut().filter(|each| goes_on && each.unsent() > 0) {
            goes_on = connection.flush().is_ok() && Instant::now() < end;
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
