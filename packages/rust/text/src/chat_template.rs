use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::{Path, PathBuf};

use minijinja::syntax::SyntaxConfig;
use minijinja::{context, Environment, Error, ErrorKind};
use serde_json::{Map, Value};

use crate::TextError;

/// What stands for an answer in a rendered conversation: answers are kept as tokens.
const ANSWER: &str = "[answer]";
/// The folder in which transformers keeps templates with names.
const NAMED: &str = "additional_chat_templates";

/// A folder's chat template, rendered as transformers does.
pub struct ChatTemplate {
    environment: Environment<'static>,
    names: BTreeMap<String, String>, // special tokens, which templates use
    path: PathBuf,
}

impl ChatTemplate {
    /// Read a folder's template: the default one of chat_template.jinja and additional_chat_templates, else of tokenizer_config.json.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, TextError> {
        let folder = folder.as_ref();
        let (config, path) = (folder.join("tokenizer_config.json"), folder.join("chat_template.jinja"));
        let mut object = read_object(&config)?;
        let templates = read_templates(folder)?;
        let from_files = !templates.is_empty();
        let found = match (from_files, object.remove("chat_template")) {
            (true, _) => Value::Object(templates),
            (false, Some(Value::Array(entries))) => {
                let named =
                    entries.iter().filter_map(|e| Some((e["name"].as_str()?.to_owned(), e["template"].clone())));
                Value::Object(named.collect())
            }
            (false, found) => found.unwrap_or_default(),
        };
        let path = match &found {
            Value::Object(named) if from_files && !named.contains_key("default") => folder.join(NAMED),
            Value::Null => path,
            _ if from_files => path,
            _ => config,
        };
        let template = match found {
            Value::String(template) => template,
            Value::Null => return Err(wrong(&path, &"is missing, and tokenizer_config.json has no chat_template")),
            Value::Object(mut named) => match named.remove("default") {
                Some(Value::String(template)) => template,
                _ => {
                    let names: Vec<_> = named.keys().map(String::as_str).collect();
                    let text = format!("has no template named default; found: {}", names.join(", "));
                    return Err(wrong(&path, &text));
                }
            },
            _ => return Err(wrong(&path, &"chat_template is no text")),
        };
        if !object.contains_key("added_tokens_decoder") {
            // older checkpoints name their tokens there
            object.extend(read_object(&folder.join("special_tokens_map.json"))?);
        }
        let tokens = object.iter().filter(|(name, _)| name.ends_with("_token"));
        let more = ["model_specific_special_tokens", "extra_special_tokens"].into_iter();
        let tokens = tokens.chain(more.filter_map(|key| object.get(key)?.as_object()).flatten());
        let text = |value: &Value| Some(value.as_str().or(value["content"].as_str())?.to_owned());
        let names = tokens.filter_map(|(name, value)| Some((name.clone(), text(value)?))).collect();

        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| wrong(&path, &error))?);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<minijinja::Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_function("strftime_now", |format: String| jiff::Zoned::now().strftime(&format).to_string());
        environment.add_template_owned("chat", template).map_err(|error| wrong(&path, &error))?;
        Ok(Self { environment, names, path })
    }

    /// Return the last message of a conversation with all that the template writes around it: from the end of the answer before it, or from
    /// the begin, to where its answer begins.
    pub fn turn(&self, system: Option<&str>, messages: &[&str]) -> Result<String, TextError> {
        let mut mark = ANSWER.to_owned();
        while messages.iter().chain(&system).any(|message| message.contains(&mark)) {
            mark = format!("[{mark}]");
        }
        let message = |role: &str, content: &str| context! { role, content };
        let mut conversation: Vec<minijinja::Value> = system.iter().map(|content| message("system", content)).collect();
        for (i, content) in messages.iter().enumerate() {
            if i > 0 {
                conversation.push(message("assistant", &mark));
            }
            conversation.push(message("user", content));
        }
        let wrong = |error: &dyn Display| wrong(&self.path, error);
        let variables = context! { messages => conversation, add_generation_prompt => true, ..minijinja::Value::from_pairs(self.names.clone()) };
        let template = self.environment.get_template("chat").map_err(|error| wrong(&error))?;
        let text = template.render(variables).map_err(|error| wrong(&error))?;
        if messages.len() < 2 {
            return Ok(text);
        }
        match text.rsplit_once(&mark) {
            Some((_, after)) => Ok(after.to_owned()),
            None => Err(wrong(&"does not render answers as they are")),
        }
    }
}

fn wrong(path: &Path, error: &dyn Display) -> TextError {
    TextError(format!("{}: {error}", path.display()))
}

fn read(path: &Path) -> Result<String, TextError> {
    std::fs::read_to_string(path).map_err(|error| wrong(path, &error))
}

/// Return a file's JSON object; a file that is not there has an empty one.
fn read_object(path: &Path) -> Result<Map<String, Value>, TextError> {
    match path.exists() {
        true => serde_json::from_str(&read(path)?).map_err(|error| wrong(path, &error)),
        false => Ok(Map::new()),
    }
}

/// Return the texts of a folder's template files by their names.
fn read_templates(folder: &Path) -> Result<Map<String, Value>, TextError> {
    let mut found = Map::new();
    let default = folder.join("chat_template.jinja");
    if default.exists() {
        found.insert("default".into(), read(&default)?.into());
    }
    let entries = std::fs::read_dir(folder.join(NAMED)).into_iter().flatten();
    for path in
        entries.flatten().map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|e| e == "jinja"))
    {
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        found.insert(name.into_owned(), read(&path)?.into());
    }
    Ok(found)
}
