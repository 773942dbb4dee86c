//! What is asked and what is answered.

use std::time::Duration;

/// One camera's frame, which is read while a call runs and not kept.
#[derive(Debug, Clone, PartialEq)]
pub struct Image<'a> {
    /// The camera's name, as the policy has it.
    pub camera: String,
    /// What it saw.
    pub pixels: Pixels<'a>,
}

/// The bytes of a frame.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pixels<'a> {
    /// `height * width * 3` bytes, row by row, RGB interleaved.
    Rgb {
        /// The bytes.
        data: &'a [u8],
        /// Rows.
        height: u32,
        /// Pixels of a row.
        width: u32,
    },
    /// `height * width * 3` numbers from 0 to 1, row by row, RGB interleaved.
    Float {
        /// The numbers.
        data: &'a [f32],
        /// Rows.
        height: u32,
        /// Pixels of a row.
        width: u32,
    },
    /// A JPEG or PNG file, which the server decodes.
    File(&'a [u8]),
}

impl<'a> Image<'a> {
    /// Describe `height * width * 3` bytes, row by row, RGB interleaved.
    pub fn rgb(camera: impl Into<String>, data: &'a [u8], height: u32, width: u32) -> Self {
        let pixels = Pixels::Rgb { data, height, width };
        Self { camera: camera.into(), pixels }
    }

    /// Describe `height * width * 3` numbers from 0 to 1, row by row, RGB interleaved.
    pub fn float(camera: impl Into<String>, data: &'a [f32], height: u32, width: u32) -> Self {
        let pixels = Pixels::Float { data, height, width };
        Self { camera: camera.into(), pixels }
    }

    /// Describe the bytes of a JPEG or PNG file.
    pub fn file(camera: impl Into<String>, data: &'a [u8]) -> Self {
        Self { camera: camera.into(), pixels: Pixels::File(data) }
    }
}

/// What a robot sees and is asked to do. Of a policy of several moments `images` has each camera once for each moment
/// and `state` the numbers of all, oldest first. What is empty or `None` is not sent; `sinew.proto` says what each
/// field means.
#[derive(Debug, Clone, Default, PartialEq)]
#[allow(missing_docs)] // those of the schema, under its names
pub struct Observation<'a> {
    pub images: Vec<Image<'a>>,
    /// World units.
    pub state: Vec<f32>,
    pub prompt: String,
    /// In the place of `prompt`.
    pub tokens: Vec<i32>,
    /// \[H, noise_dim\], row by row.
    pub noise: Vec<f32>,
    pub seed: Option<u64>,
    pub solver_steps: Option<u32>,
    pub session: String,
    /// Seconds, echoed.
    pub time: Option<f64>,
    /// Milliseconds from arrival; a request that would begin later is refused.
    pub deadline_ms: Option<f32>,
    /// Real-time chunking: the rows of the running chunk from this frame on, \[R, action_dim\].
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

/// Where the milliseconds of a reply went; `sinew.proto` says what each is.
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
    /// Requests that were computed at once.
    pub batch: u32,
    pub reused_views: u32,
    pub reused_prefix: bool,
}

/// What a robot is to do next.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Chunk {
    /// \[rows, dim\], row by row, world units.
    pub actions: Vec<f32>,
    /// Control steps; 0 where words alone were asked for.
    pub rows: usize,
    /// Numbers of a row, 1 or more.
    pub dim: usize,
    /// Where the time went.
    pub timing: Timing,
    /// Draws the same noise again.
    pub seed: Option<u64>,
    /// As it was asked.
    pub session: String,
    /// As it was asked.
    pub time: Option<f64>,
    /// What the policy had to do without, in sentences.
    pub warnings: Vec<String>,
    /// The words that were asked for.
    pub text: String,
    /// The adapter that computed the chunk.
    pub adapter: String,
    /// From the call to its return.
    pub round_trip: Duration,
}

impl Chunk {
    /// Return the rows, one after the other, `dim` numbers each.
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

/// Nodes `step`, `step + 1` ... of a stream's trajectory; node k belongs to k / rate seconds of the robot's clock. No
/// rows: the answer comes later than they would reach. `sinew.proto` says what each field is.
#[derive(Debug, Clone, Default, PartialEq)]
#[allow(missing_docs)]
pub struct Window {
    pub step: i64,
    /// \[rows, dim\], row by row, world units.
    pub actions: Vec<f32>,
    pub rows: usize,
    pub dim: usize,
    pub sample_time: f64,
    pub frame_time: f64,
    pub prefix_age_ms: f32,
    pub sensor_age_ms: f32,
    pub head_ms: f32,
    pub run: u64,
    /// Of the message with the newest sample.
    pub request_id: u64,
    pub label: String,
    pub text: String,
    pub said: String,
}

/// How a client asks, and what it takes for an answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// Of each call, connecting included. The look-up of a host's name is the system's and not within it.
    pub timeout: Duration,
    /// Empty where the server requires none. It is not encrypted, so an address of another machine is rejected, unless
    /// `SINEW_ALLOW_UNENCRYPTED_KEY` is 1 in the environment.
    pub api_key: String,
    /// Longer chunks are refused.
    pub max_rows: usize,
    /// The lowest of each action, `dim` numbers; an answer below is refused.
    pub low: Option<Vec<f32>>,
    /// The highest of each action.
    pub high: Option<Vec<f32>>,
}

impl Default for Options {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(10), api_key: String::new(), max_rows: 1024, low: None, high: None }
    }
}

/// How a robot's run goes, for the server's dashboard: `Report` of `sinew.proto`, which says what each field is.
#[derive(Debug, Clone, Default, PartialEq)]
#[allow(missing_docs)]
pub struct Report {
    /// Drawn at random: tells robots of one host and session apart.
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
    /// Control steps by reason, 12 at most.
    pub held: Vec<(String, u64)>,
    pub clipped_commands: u64,
    /// Commands by the limit that changed them.
    pub clipped: Vec<(String, u64)>,
    pub limits: Vec<String>,
    pub failed_requests: u64,
    pub takeovers: u64,
    pub steps_by_hand: u64,
    pub episodes: Option<u64>,
    pub successes: Option<u64>,
    /// x, y, z of each joint, metres.
    pub arm: Vec<f32>,
}
