//! The client of one server.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::messages::{self, Control};
#[cfg(unix)]
use crate::zmtp::UnixPlace;
use crate::zmtp::{Connection, Place};
use crate::{Chunk, Error, Observation, Options, Report, Result};

/// The longest time limit, one year. `Instant` could not represent the end of a much longer time limit.
pub(crate) const LONGEST: Duration = Duration::from_secs(365 * 86400);

/// A client of one server. The first call opens the connection.
///
/// If the connection breaks or a reply is late, the client closes the connection, and the next call opens a new one. So
/// a late reply cannot be taken for the reply to a later request.
pub struct Client {
    options: Options,
    place: Place,
    policy: String,
    last_id: u64,
    connection: Option<Connection>,
}

impl Client {
    /// Create a client for the address `[tcp://]HOST:PORT[/POLICY]` or, on Unix, `ipc:///PATH[#POLICY]`. The first call
    /// connects, not this function.
    ///
    /// # Errors
    /// [`Error::BadAddress`].
    pub fn connect(address: &str) -> Result<Self> {
        Self::with_options(address, Options::default())
    }

    /// Create a client with other options than the defaults.
    ///
    /// # Errors
    /// [`Error::BadAddress`].
    pub fn with_options(address: &str, options: Options) -> Result<Self> {
        let (place, policy) = split(address, &options)?;
        Ok(Self { options, place, policy, last_id: 0, connection: None })
    }

    /// Change the time limit of later calls.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.options.timeout = timeout;
    }

    /// Return the actions for one observation.
    ///
    /// # Errors
    /// Any [`Error`] except [`Error::BadAddress`].
    pub fn infer(&mut self, seen: &Observation<'_>) -> Result<Chunk> {
        let begun = Instant::now();
        let id = self.next_id();
        let request = messages::encode_infer(seen, id, &self.options.api_key, &self.policy)?;
        let reply = self.ask(&request, begun)?;
        let mut chunk = messages::decode_chunk(&reply, id, seen, &self.options);
        if let Ok(chunk) = &mut chunk {
            chunk.round_trip = begun.elapsed();
        }
        self.keep(chunk)
    }

    /// Send 1 to 64 observations in one message, and return one result for each, in the same order.
    ///
    /// An error in one result does not affect the other results. `deadline_ms` applies to all observations: the server
    /// rejects them if they wait longer than this number of milliseconds after their arrival.
    ///
    /// # Errors
    /// Any [`Error`] except [`Error::BadAddress`]. After [`Error::BadObservation`], the client has sent nothing.
    pub fn infer_all(&mut self, seen: &[Observation<'_>], deadline_ms: Option<f32>) -> Result<Vec<Result<Chunk>>> {
        let begun = Instant::now();
        let id = self.next_id();
        let request = messages::encode_infer_all(seen, id, deadline_ms, &self.options.api_key, &self.policy)?;
        let reply = self.ask(&request, begun)?;
        let mut answers = messages::decode_all(&reply, id, seen, &self.options);
        let taken = begun.elapsed();
        answers.iter_mut().flatten().flatten().for_each(|chunk| chunk.round_trip = taken);
        self.keep(answers)
    }

    /// Return a description of the server and of its policy's inputs and outputs, as JSON.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::ConnectionLost`], [`Error::BadReply`], [`Error::Server`].
    pub fn metadata(&mut self) -> Result<String> {
        self.control(Control::Metadata, "")
    }

    /// Return the server's status and counters, as JSON.
    ///
    /// # Errors
    /// The same errors as [`Client::metadata`].
    pub fn health(&mut self) -> Result<String> {
        self.control(Control::Health, "")
    }

    /// Tell the server that a new episode starts in a session. A client with only one session can pass "".
    ///
    /// # Errors
    /// The same errors as [`Client::metadata`].
    pub fn reset(&mut self, session: &str) -> Result<()> {
        self.control(Control::Reset, session).map(|_| ())
    }

    /// Send a report of the robot's run to the server, which shows it in its dashboard.
    ///
    /// # Errors
    /// The same errors as [`Client::metadata`].
    pub fn report(&mut self, session: &str, report: &Report) -> Result<()> {
        self.control(Control::Report(report), session).map(|_| ())
    }

    /// Close the connection. A later call opens a new connection.
    pub fn close(&mut self) {
        self.connection = None;
    }

    fn control(&mut self, kind: Control<'_>, session: &str) -> Result<String> {
        let begun = Instant::now();
        let id = self.next_id();
        let request = messages::encode_control(kind, id, session, &self.options.api_key, &self.policy);
        let reply = self.ask(&request, begun)?;
        self.keep(messages::decode_control(&reply, id))
    }

    fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    fn ask(&mut self, request: &[u8], begun: Instant) -> Result<Vec<u8>> {
        let end = begun + self.options.timeout.min(LONGEST);
        let mut connection = match self.connection.take().and_then(Connection::if_idle) {
            Some(kept) => kept,
            None => Connection::open(&self.place, end, "REQ")?,
        };
        let reply = connection.ask(request, end)?;
        self.connection = Some(connection);
        Ok(reply)
    }

    /// Return the given result. If the reply was malformed, close the connection first, because the next reply may then
    /// belong to another request.
    fn keep<T>(&mut self, read: Result<T>) -> Result<T> {
        if matches!(read, Err(Error::BadReply(_))) {
            self.close();
        }
        read
    }
}

pub(crate) fn split(address: &str, options: &Options) -> Result<(Place, String)> {
    let (place, policy) = place_of(address)
        .ok_or_else(|| Error::BadAddress(format!("address: expected tcp://HOST:PORT or ipc:///PATH, got {address}")))?;
    let allowed = std::env::var("SINEW_ALLOW_UNENCRYPTED_KEY").is_ok_and(|value| value == "1");
    if let Place::Tcp { host, port } = &place {
        if !options.api_key.is_empty() && !allowed && !is_loopback(host) {
            return Err(Error::BadAddress(format!(
                "address: expected encryption for the API key, got a plain connection to {host}; run `ssh -N -L \
                 {port}:127.0.0.1:{port} {host}` and use tcp://127.0.0.1:{port}, or on a network that you trust set \
                 SINEW_ALLOW_UNENCRYPTED_KEY=1"
            )));
        }
    }
    Ok((place, policy))
}

/// Return true for an address or a name that only this machine can reach.
fn is_loopback(host: &str) -> bool {
    match host.parse::<IpAddr>() {
        Ok(IpAddr::V4(address)) => address.is_loopback(),
        Ok(IpAddr::V6(address)) => {
            address.is_loopback() || address.to_ipv4_mapped().is_some_and(|inner| inner.is_loopback())
        }
        Err(_) => host == "localhost",
    }
}

fn place_of(address: &str) -> Option<(Place, String)> {
    #[cfg(unix)]
    if let Some(path) = address.strip_prefix("ipc://") {
        let (path, policy) = path.split_once('#').unwrap_or((path, ""));
        return path.starts_with('/').then(|| (Place::Unix(UnixPlace::new(path)), policy.into()));
    }
    let rest = address.strip_prefix("tcp://").unwrap_or(address);
    let (place, policy) = rest.split_once('/').unwrap_or((rest, ""));
    let (host, digits) = place.rsplit_once(':')?;
    let host = host.strip_prefix('[').and_then(|inner| inner.strip_suffix(']')).unwrap_or(host);
    let port: u16 = digits.parse().ok().filter(|&port| port > 0 && !digits.starts_with('+'))?;
    (!host.is_empty()).then(|| (Place::Tcp { host: host.into(), port }, policy.into()))
}
