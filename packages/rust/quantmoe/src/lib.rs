//! Exported QuantMoE models in your program: text in, text out.
//!
//! ```no_run
//! use quantmoe::{Chat, Generator, Options, Sampling};
//!
//! let model = Generator::open("OUTDIR")?;
//! let mut chat = Chat::new(&model)?;
//! for piece in chat.reply("The old house", Options { sampling: Some(Sampling::greedy()), ..Options::default() })? {
//!     print!("{}", piece?);
//! }
//! # Ok::<(), quantmoe::Error>(())
//! ```

mod cache_input;
mod chat;
mod error;
mod generator;
mod saved_cache;
mod token_cache;

pub use chat::{Chat, Reply, ReplyInfo};
pub use error::Error;
pub use generator::Generator;
pub use ort; // whose types Generator::open_with takes
pub use quantmoe_text::{ChatTemplate, Sampling, TextError, TextStream, TextTokenizer};
pub use token_cache::{Cancel, TokenCache, Tokens};

/// Options of an answer.
#[derive(Debug, Clone)]
pub struct Options {
    /// The most tokens of the answer.
    pub max_new_tokens: usize,
    /// How tokens are chosen; None: as the model's makers recommend.
    pub sampling: Option<Sampling>,
    /// Strings that end the answer; they are not part of it. Only for text.
    pub stop: Vec<String>,
    /// Ends the answer within a step.
    pub cancel: Cancel,
}

impl Default for Options {
    fn default() -> Self {
        Self { max_new_tokens: 512, sampling: None, stop: Vec::new(), cancel: Cancel::default() }
    }
}
