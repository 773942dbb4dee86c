//! The types of requests and answers.

use std::time::Duration;

/// One camera's frame. The client borrows the pixels only during a call.
#[derive(Debug, Clone, PartialEq)]
pub struct Image<'a> {
    /// The policy's name of the camera.
    pub camera: String,
    /// The pixels.
    pub pixels: Pixels<'a>,
}

/// The pixels of a frame.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pixels<'a> {
    /// `height * width * 3` bytes in row-major order, RGB interleaved.
    Rgb {
        /// The bytes of the pixels.
        data: &'a [u8],
        /// Height in pixels.
        height: u32,
        /// Width in pixels.
        width: u32,
    },
    /// `height * width * 3` numbers from 0 to 1 in row-major order, RGB interleaved.
    Float {
        /// The numbers of the pixels.
        data: &'a [f32],
        /// Height in pixels.
        height: u32,
        /// Width in pixels.
        width: u32,
    },
    /// The bytes of a JPEG or PNG file. The server decodes them.
    File(&'a [u8]),
}

impl<'a> Image<'a> {
    /// Create an image from `height * width * 3` bytes in row-major order, RGB interleaved.
    pub fn rgb(camera: impl Into<String>, data: &'a [u8], height: u32, width: u32) -> Self {
        let pixels = Pixels::Rgb { data, height, width };
        Self { camera: camera.into(), pixels }
    }

    /// Create an image from `height * width * 3` numbers from 0 to 1 in row-major order, RGB interleaved.
    pub fn float(camera: impl Into<String>, data: &'a [f32], height: u32, width: u32) -> Self {
        let pixels = Pixels::Float { data, height, width };
        Self { camera: camera.into(), pixels }
    }

    /// Create an image from the bytes of a JPEG or PNG file.
    pub fn file(camera: impl Into<String>, data: &'a [u8]) -> Self {
        Self { camera: camera.into(), pixels: Pixels::File(data) }
    }
}

/// The robot's observation and instruction. The client does not send fields that are empty or `None`. `sinew.proto`
/// describes each field.
///
/// Some policies read several time steps. For such a policy, `images` contains each camera once for each time step, and
/// `state` contains the values of all time steps. The oldest time step comes first.
#[derive(Debug, Clone, Default, PartialEq)]
#[allow(missing_docs)] // sinew.proto describes the other fields under the same names
pub struct Observation<'a> {
    pub images: Vec<Image<'a>>,
    /// The state in the robot's own units.
    pub state: Vec<f32>,
    pub prompt: String,
    /// The instruction as token ids, instead of `prompt`.
    pub tokens: Vec<i32>,
    /// The noise that the solver starts from, \[H, noise_dim\] in row-major order.
    pub noise: Vec<f32>,
    pub seed: Option<u64>,
    pub solver_steps: Option<u32>,
    pub session: String,
    /// The capture time in seconds. The chunk has the same value.
    pub time: Option<f64>,
    /// The server rejects the request if it waits longer than this number of milliseconds after its arrival.
    pub deadline_ms: Option<f32>,
    /// Real-time chunking: the remaining actions of the running chunk, \[R, action_dim\].
    pub previous: Vec<f32>,
    pub delay: Option<u32>,
    pub horizon: Option<u32>,
    pub rtc: String,
    pub schedule: String,
    pub beta: Option<f32>,
    pub advantage: Option<String>,
    pub guidance_scale: Option<f64>,
    pub adapter: String,
    pub subtask: bool,
    pub text_only: bool,
    pub question: String,
    pub text_tokens: u32,
}

/// Durations on the server in milliseconds. `sinew.proto` describes each field.
#[derive(Debug, Clone, Default, PartialEq)]
#[allow(missing_docs)]
pub struct Timing {
    pub preprocess_ms: f32,
    pub vision_ms: f32,
    pub prefix_ms: f32,
    pub step_ms: Vec<f32>,
    pub postprocess_ms: f32,
    pub total_ms: f32,
    pub queue_ms: f32,
    pub server_ms: f32,
    pub text_ms: f32,
    /// The number of requests that were computed together.
    pub batch: u32,
    pub reused_views: u32,
    pub reused_prefix: bool,
}

/// The answer to an observation: a chunk of actions, or generated text.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Chunk {
    /// The actions in the robot's own units, \[rows, dim\] in row-major order.
    pub actions: Vec<f32>,
    /// The number of actions. 0 if the request asked only for text.
    pub rows: usize,
    /// The number of values in an action, 1 or more.
    pub dim: usize,
    /// Durations on the server.
    pub timing: Timing,
    /// The seed that reproduces the noise.
    pub seed: Option<u64>,
    /// The session of the request.
    pub session: String,
    /// The time of the request.
    pub time: Option<f64>,
    /// Sentences about inputs that the policy had to do without.
    pub warnings: Vec<String>,
    /// The generated text.
    pub text: String,
    /// The adapter that computed the chunk.
    pub adapter: String,
    /// The duration of the whole call.
    pub round_trip: Duration,
}

impl Chunk {
    /// Iterate over the actions. Each item has `dim` values.
    pub fn iter(&self) -> std::slice::ChunksExact<'_, f32> {
        self.actions.chunks_exact(self.dim.max(1))
    }
}

impl<'a> IntoIterator for &'a Chunk {
    type Item = &'a [f32];
    type IntoIter = std::slice::ChunksExact<'a, f32>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// The nodes `step`, `step + 1` and so on of a stream's trajectory. Node k belongs to k / rate seconds of the robot's
/// clock. A window has no nodes (`rows` is 0) if the answer came too late for all of them. `sinew.proto` describes each
/// field.
#[derive(Debug, Clone, Default, PartialEq)]
#[allow(missing_docs)]
pub struct Window {
    pub step: i64,
    /// The nodes in the robot's own units, \[rows, dim\] in row-major order.
    pub actions: Vec<f32>,
    pub rows: usize,
    pub dim: usize,
    pub sample_time: f64,
    pub frame_time: f64,
    pub prefix_age_ms: f32,
    pub sensor_age_ms: f32,
    pub head_ms: f32,
    pub run: u64,
    /// The number of the message with the newest sample.
    pub request_id: u64,
    pub label: String,
    pub text: String,
    pub said: String,
}

/// The options of a client or stream.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// The time limit of each call, including the connection. It does not limit the operating system's look-up of a
    /// host name.
    pub timeout: Duration,
    /// The API key. Empty if the server requires no key. The key is not encrypted, so the client rejects a key for the
    /// address of another machine, unless `SINEW_ALLOW_UNENCRYPTED_KEY` is 1 in the environment.
    pub api_key: String,
    /// The client rejects chunks with more actions than this.
    pub max_rows: usize,
    /// The lower limit for each value of an action, `dim` numbers. The client rejects chunks with a smaller value.
    pub low: Option<Vec<f32>>,
    /// The upper limit for each value of an action, `dim` numbers. The client rejects chunks with a larger value.
    pub high: Option<Vec<f32>>,
}

impl Default for Options {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(10), api_key: String::new(), max_rows: 1024, low: None, high: None }
    }
}

/// The report of a robot's run, for the server's dashboard. The message `Report` of `sinew.proto` describes each field.
#[derive(Debug, Clone, Default, PartialEq)]
#[allow(missing_docs)]
pub struct Report {
    /// A random number that separates two robots with the same host and session.
    pub run: u64,
    pub name: String,
    /// One of starting, moves, holds, paused, aligning, human, returning, ended.
    pub state: String,
    pub reason: String,
    pub hz: f64,
    pub rate_hz: f64,
    pub rows_hz: f64,
    pub age_p50_ms: Option<f64>,
    pub age_p95_ms: Option<f64>,
    pub steps: u64,
    pub late: u64,
    pub skipped: u64,
    /// The number of control steps in which the robot held, for each reason. At most 12 reasons.
    pub held: Vec<(String, u64)>,
    pub clipped_commands: u64,
    /// The number of commands that a limit changed, for each limit.
    pub clipped: Vec<(String, u64)>,
    pub limits: Vec<String>,
    pub failed_requests: u64,
    pub takeovers: u64,
    pub steps_by_hand: u64,
    pub episodes: Option<u64>,
    pub successes: Option<u64>,
    /// The arm's last position: x, y, z of the base, each joint and the tip, in metres.
    pub arm: Vec<f32>,
}
