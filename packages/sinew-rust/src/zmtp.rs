//! A REQ or DEALER socket of the protocol ZMTP 3 without encryption (<https://rfc.zeromq.org/spec/23>), over TCP or a
//! Unix socket.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
#[cfg(unix)]
use std::os::unix::net::UnixStream;
#[cfg(unix)]
use std::sync::mpsc::{sync_channel, Receiver, RecvTimeoutError};
#[cfg(unix)]
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::{Error, Result};

const MAX_REPLY: u64 = 1 << 28; // bytes
const MAX_COMMAND: u64 = 1024; // bytes
const GREETING: usize = 64; // bytes

// MORE, LONG and COMMAND are the flags of a ZMTP frame.
const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;
const MAX_TURNS: usize = 64; // reads of at most 64 KiB each, before the received messages are decoded
const NAP: Duration = Duration::from_millis(2); // the wait between two attempts to send waiting messages
const PAUSE: Duration = Duration::from_millis(100); // the wait between two attempts to connect

/// The address of a server.
#[derive(Debug)]
pub(crate) enum Place {
    Tcp {
        host: String,
        port: u16,
    },
    #[cfg(unix)]
    Unix(UnixPlace),
}

/// The path of a Unix socket, and the attempt to connect to it.
///
/// `UnixStream::connect` has no time limit, and it waits as long as the server's queue of connections is full. So a
/// thread calls it. If the time limit ends first, the thread continues, and the next call waits for the same thread.
#[cfg(unix)]
#[derive(Debug)]
pub(crate) struct UnixPlace {
    path: String,
    under_way: Mutex<Option<Receiver<io::Result<UnixStream>>>>,
}

#[cfg(unix)]
impl UnixPlace {
    pub(crate) fn new(path: &str) -> Self {
        Self { path: path.into(), under_way: Mutex::new(None) }
    }

    fn connect(&self, time: Duration) -> io::Result<UnixStream> {
        let mut under_way = self.under_way.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let attempt = under_way.take().map_or_else(|| self.begin(), Ok)?;
        match attempt.recv_timeout(time) {
            Ok(outcome) => outcome,
            Err(RecvTimeoutError::Timeout) => {
                *under_way = Some(attempt);
                Err(io::Error::new(ErrorKind::TimedOut, "the server accepts no connection"))
            }
            Err(error @ RecvTimeoutError::Disconnected) => Err(io::Error::new(ErrorKind::Other, error)),
        }
    }

    fn begin(&self) -> io::Result<Receiver<io::Result<UnixStream>>> {
        let (send, receive) = sync_channel(1);
        let path = self.path.clone();
        // Ignore an error of `send`: the caller may have dropped the receiver.
        std::thread::Builder::new().spawn(move || drop(send.send(UnixStream::connect(path))))?;
        Ok(receive)
    }
}

/// Check that the socket belongs to this user or to root. Otherwise, another user could bind the path first and receive
/// the key. The check needs `/proc`, so a system without `/proc` skips it.
#[cfg(unix)]
fn check_owner(path: &str) -> Result<()> {
    use std::os::unix::fs::MetadataExt;
    let Ok(own) = std::fs::metadata("/proc/self").map(|found| found.uid()) else { return Ok(()) };
    let owner = std::fs::metadata(path).map(|found| found.uid()).unwrap_or(u32::MAX);
    if owner == own || owner == 0 {
        return Ok(());
    }
    let text = format!(
        "ipc://{path}: expected a server of user {own} or of root, got one of user {owner}; nothing was sent. \
         Start the server as the user of the robot, in a folder that others cannot write"
    );
    Err(Error::ConnectionLost(text))
}

trait Stream: Read + Write + Send {
    fn wait_at_most(&self, time: Duration) -> io::Result<()>;
    fn set_nonblocking(&self, on: bool) -> io::Result<()>;
}

macro_rules! stream {
    ($kind:ty) => {
        impl Stream for $kind {
            fn wait_at_most(&self, time: Duration) -> io::Result<()> {
                self.set_read_timeout(Some(time))?;
                self.set_write_timeout(Some(time))
            }
            fn set_nonblocking(&self, on: bool) -> io::Result<()> {
                <$kind>::set_nonblocking(self, on)
            }
        }
    };
}

stream!(TcpStream);
#[cfg(unix)]
stream!(UnixStream);

/// One connection to a server. Drop the connection after an error.
pub(crate) struct Connection {
    stream: Box<dyn Stream>,
    buffer: Vec<u8>,           // received bytes that are not decoded yet
    unsent: VecDeque<Vec<u8>>, // messages that wait to be sent (only DEALER)
}

impl Connection {
    /// Connect and do the handshake of a socket of this kind, at the latest until `end`. The server may start later, so
    /// repeat failed attempts.
    pub(crate) fn open(place: &Place, end: Instant, kind: &str) -> Result<Self> {
        let stream: Box<dyn Stream> = match place {
            Place::Tcp { host, port } => Box::new(tcp(host, *port, end)?),
            #[cfg(unix)]
            Place::Unix(place) => {
                let made = until(end, &place.path, 1, |_, time| place.connect(time))?;
                check_owner(&place.path)?;
                Box::new(made)
            }
        };
        let mut made = Self { stream, buffer: Vec::new(), unsent: VecDeque::new() };
        let mut greeting = [0; GREETING];
        greeting[0] = 0xff;
        greeting[9..12].copy_from_slice(&[0x7f, 3, 1]);
        greeting[12..16].copy_from_slice(b"NULL");
        made.send(&greeting, end)?;
        made.receive(GREETING, end)?;
        if made.buffer[0] != 0xff || made.buffer[10] < 3 || made.buffer[12..17] != *b"NULL\0" {
            let text = "no ZeroMQ server of ZMTP 3 without encryption is at this address";
            return Err(Error::ConnectionLost(text.into()));
        }
        made.buffer.drain(..GREETING);
        let kind = [&[kind.len() as u8], kind.as_bytes()].concat();
        let ready = [b"\x05READY\x0bSocket-Type\0\0\0", &kind[..], b"\x08Identity\0\0\0\0"].concat();
        made.send(&[head(ready.len(), COMMAND), ready].concat(), end)?;
        while !made.command(end)?.starts_with(b"\x05READY") {}
        Ok(made)
    }

    /// Return the connection if it can send a request. Return `None` if the server closed the connection or sent a
    /// message without a request.
    pub(crate) fn if_idle(mut self) -> Option<Self> {
        let mut part = [0; 4096];
        self.stream.set_nonblocking(true).ok()?;
        match self.stream.read(&mut part) {
            Ok(0) => return None,
            Ok(count) => self.buffer.extend_from_slice(&part[..count]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(_) => return None,
        }
        self.stream.set_nonblocking(false).ok()?;
        // A received command may be a heartbeat. Keep it: `frame` reads commands before the reply.
        self.buffer.first().map_or(true, |flags| flags & COMMAND != 0).then_some(self)
    }

    /// Send a request and return its reply.
    pub(crate) fn ask(&mut self, request: &[u8], end: Instant) -> Result<Vec<u8>> {
        let mut before = head(0, MORE); // a REQ socket sends an empty frame before each request
        before.extend(head(request.len(), 0));
        self.send(&before, end)?;
        self.send(request, end)?;
        let (flags, empty) = self.frame(end)?;
        if flags & MORE == 0 || !empty.is_empty() {
            return Err(not_two());
        }
        match self.frame(end)? {
            (flags, reply) if flags & MORE == 0 => Ok(reply),
            _ => Err(not_two()),
        }
    }

    /// Return the next frame of a message, and answer the commands before it.
    fn frame(&mut self, end: Instant) -> Result<(u8, Vec<u8>)> {
        loop {
            self.receive(1, end)?;
            if self.buffer[0] & COMMAND == 0 {
                return self.raw(end);
            }
            self.command(end)?;
        }
    }

    /// Return the next command. If the command is a ping, answer it.
    fn command(&mut self, end: Instant) -> Result<Vec<u8>> {
        let (flags, body) = self.raw(end)?;
        if flags & COMMAND == 0 {
            return Err(not_two());
        }
        if let Some(answer) = heard(&body)? {
            self.send(&answer, end)?;
        }
        Ok(body)
    }

    fn raw(&mut self, end: Instant) -> Result<(u8, Vec<u8>)> {
        left(end)?; // checked for each frame, because a server may send bytes without end
        loop {
            match self.whole()? {
                Some(found) => return Ok(found),
                None => self.receive(self.buffer.len() + 1, end)?,
            }
        }
    }

    /// Return the next frame, or `None` if the frame is not complete yet.
    fn whole(&mut self) -> Result<Option<(u8, Vec<u8>)>> {
        let have = self.buffer.len();
        if have < 2 || (self.buffer[0] & LONG != 0 && have < 9) {
            return Ok(None);
        }
        let flags = self.buffer[0];
        let (start, size) = match flags & LONG {
            0 => (2, u64::from(self.buffer[1])),
            _ => (9, self.buffer[1..9].iter().fold(0, |size, &byte| size << 8 | u64::from(byte))),
        };
        let most = if flags & COMMAND == 0 { MAX_REPLY } else { MAX_COMMAND };
        if size > most {
            return Err(Error::BadReply(format!("the reply: expected at most {most} bytes, got {size}")));
        }
        let whole = start + size as usize; // at most 9 + 2^28, so the sum cannot overflow
        if have < whole {
            return Ok(None);
        }
        let body = self.buffer[start..whole].to_vec();
        self.buffer.drain(..whole);
        Ok(Some((flags, body)))
    }

    /// Return the number of messages that are not sent completely.
    pub(crate) fn unsent(&self) -> usize {
        self.unsent.len()
    }

    /// Send a message of one frame, as many bytes as the socket accepts now. Later calls send the rest.
    pub(crate) fn put(&mut self, message: &[u8]) -> Result<()> {
        self.unsent.push_back([&head(message.len(), 0), message].concat());
        self.flush()
    }

    /// Send waiting messages, as many bytes as the socket accepts now.
    pub(crate) fn flush(&mut self) -> Result<()> {
        self.stream.set_nonblocking(true).map_err(lost)?;
        while let Some(first) = self.unsent.front_mut() {
            match self.stream.write(first) {
                Ok(sent) => drop(first.drain(..sent)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => may_go_on(error)?,
            }
            if first.is_empty() {
                self.unsent.pop_front();
            }
        }
        Ok(())
    }

    /// Return the next message of one frame, or `None` if no message arrives until `end`.
    pub(crate) fn get(&mut self, end: Instant) -> Result<Option<Vec<u8>>> {
        let mut part = [0; 1 << 16];
        loop {
            self.flush()?;
            let mut turns = 0;
            while turns < MAX_TURNS && self.take(&mut part)? {
                turns += 1;
            }
            while let Some((flags, body)) = self.whole()? {
                match flags & (COMMAND | MORE) {
                    0 => return Ok(Some(body)),
                    COMMAND => self.unsent.extend(heard(&body)?),
                    _ => return Err(Error::BadReply("the message: expected one frame, got more".into())),
                }
            }
            let Ok(time) = left(end) else { return Ok(None) };
            self.stream.set_nonblocking(false).map_err(lost)?;
            let time = if self.unsent.is_empty() { time } else { time.min(NAP) };
            self.stream.wait_at_most(time).map_err(lost)?;
            self.take(&mut part)?;
        }
    }

    /// Append received bytes to the buffer. Return false if there are none before the read's time limit.
    fn take(&mut self, part: &mut [u8]) -> Result<bool> {
        match self.stream.read(part) {
            Ok(0) => return Err(Error::ConnectionLost("the server has closed the connection".into())),
            Ok(got) => self.buffer.extend_from_slice(&part[..got]),
            Err(error) => return may_go_on(error).map(|()| false),
        }
        Ok(true)
    }

    /// Wait until the buffer has at least `count` bytes.
    fn receive(&mut self, count: usize, end: Instant) -> Result<()> {
        let mut part = [0; 1 << 16];
        while self.buffer.len() < count {
            self.stream.wait_at_most(left(end)?).map_err(lost)?; // checked in each turn, see `raw`
            self.take(&mut part)?;
        }
        left(end).map(|_| ())
    }

    fn send(&mut self, mut bytes: &[u8], end: Instant) -> Result<()> {
        while !bytes.is_empty() {
            self.stream.wait_at_most(left(end)?).map_err(lost)?;
            match self.stream.write(bytes) {
                Ok(0) => return Err(Error::ConnectionLost("the server has closed the connection".into())),
                Ok(sent) => bytes = &bytes[sent..],
                Err(error) => may_go_on(error)?,
            }
        }
        Ok(())
    }
}

fn head(size: usize, flags: u8) -> Vec<u8> {
    match u8::try_from(size) {
        Ok(size) => vec![flags, size],
        Err(_) => [&[flags | LONG][..], &(size as u64).to_be_bytes()].concat(),
    }
}

/// Return the answer to a command: a pong for a ping, and `None` for other commands.
fn heard(command: &[u8]) -> Result<Option<Vec<u8>>> {
    if let Some(reason) = command.strip_prefix(b"\x05ERROR") {
        let reason = String::from_utf8_lossy(reason);
        return Err(Error::ConnectionLost(format!("the server refuses the connection: {reason}")));
    }
    Ok(command.strip_prefix(b"\x04PING").map(|rest| {
        let context = rest.get(2..).unwrap_or_default();
        let pong = [b"\x04PONG", &context[..context.len().min(16)]].concat();
        [head(pong.len(), COMMAND), pong].concat()
    }))
}

fn not_two() -> Error {
    Error::BadReply("the reply: expected an empty frame and one more".into())
}

fn lost(error: io::Error) -> Error {
    Error::ConnectionLost(error.to_string())
}

fn late() -> Error {
    Error::Timeout("no answer in time".into())
}

/// Return the remaining time until `end`, which is above zero, or the error of a timeout.
fn left(end: Instant) -> Result<Duration> {
    match end.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(late()),
        time => Ok(time),
    }
}

fn may_go_on(error: io::Error) -> Result<()> {
    match error.kind() {
        // The caller checks the remaining time with `left`, so a timeout of the socket is no error here.
        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => Ok(()),
        _ => Err(lost(error)),
    }
}

/// Try a host's addresses in turn until the time is over. An address that does not react gets an equal share of the
/// remaining time.
fn tcp(host: &str, port: u16, end: Instant) -> Result<TcpStream> {
    let lookup = (host, port).to_socket_addrs();
    let found: Vec<SocketAddr> = lookup.map_err(|error| Error::ConnectionLost(format!("{host}: {error}")))?.collect();
    if found.is_empty() {
        return Err(Error::ConnectionLost(format!("{host}: expected an address, got none")));
    }
    until(end, &format!("{host}:{port}"), found.len(), |index, time| {
        let stream = TcpStream::connect_timeout(&found[index], time)?;
        stream.set_nodelay(true)?;
        Ok(stream)
    })
}

fn until<S>(end: Instant, place: &str, count: usize, open: impl Fn(usize, Duration) -> io::Result<S>) -> Result<S> {
    let mut index = 0;
    let mut wrong = String::from("not tried");
    loop {
        let time = end.saturating_duration_since(Instant::now());
        if time.is_zero() {
            return Err(Error::Timeout(format!("no server at {place}: {wrong}")));
        }
        match open(index, time / (count - index) as u32) {
            Ok(stream) => return Ok(stream),
            Err(error) => wrong = error.to_string(),
        }
        index = (index + 1) % count;
        std::thread::sleep(PAUSE.min(end.saturating_duration_since(Instant::now())));
    }
}
