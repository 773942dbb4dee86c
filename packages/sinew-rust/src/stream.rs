//! A stream to one server.

use std::time::{Duration, Instant};

use crate::client::{split, LONGEST};
use crate::messages::{self, Pace};
use crate::zmtp::{Connection, Place};
use crate::{Error, Observation, Options, Result, Window};

/// The limit of waiting messages. A message behind four others would be too old when it leaves.
const MAX_UNSENT: usize = 4;
const LINGER: Duration = Duration::from_millis(50); // `drop` waits at most so long until the end of the stream is sent

/// A stream to one server: it sends samples and frames, and receives windows (docs/stream.md).
///
/// After [`Error::ConnectionLost`] or [`Error::BadReply`], the next sample opens a new connection and starts a new
/// stream. After an error from the server, the stream continues.
pub struct Stream {
    options: Options,
    place: Place,
    policy: String,
    pace: Pace,
    session: String,
    last_id: u64,
    ended: u64, // the number of the previous stream's last message
    connection: Option<Connection>,
}

impl Stream {
    /// Create a stream with `rate` nodes per second. The form of the address is the same as for
    /// [`Client`](crate::Client). The first sample connects, not this function.
    ///
    /// `interpolation` is "", `linear` or `hold`: how an ordinary checkpoint's actions become nodes.
    ///
    /// # Errors
    /// [`Error::BadAddress`].
    pub fn new(address: &str, rate: f32, options: Options, interpolation: &str) -> Result<Self> {
        let (place, policy) = split(address, &options)?;
        let pace = Pace { rate, frame_time: None, interpolation: interpolation.into() };
        Ok(Self { options, place, policy, pace, session: String::new(), last_id: 0, ended: 0, connection: None })
    }

    /// Open the connection within the time limit, if it is not open. [`Stream::send`] also opens the connection.
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

    /// Send a sample with its new frames, if there are any. Return false and send nothing if four earlier messages have
    /// not left yet. An open connection never makes this call wait.
    ///
    /// The sample's `time` is required, in seconds of the robot's clock. Its `delay` is the number of nodes from the
    /// sample's node to the first node that the answer can still change (1 if absent). `frame_time` is the time when
    /// the cameras captured the frames (`time` if absent).
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

    /// Return the next window of this stream, or `None` if no window arrives within `wait`.
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

    /// End the stream. After this call, [`Stream::next_window`] returns no window of this stream. The next sample
    /// starts a new, independent stream.
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
