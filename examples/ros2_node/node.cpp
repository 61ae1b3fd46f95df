// A ROS 2 node: prompts on ~/prompt, the growing answer on ~/text; ~/stop ends it. The parameter tau applies from the
// next step on; below 0 it means exact mode.
#include <memory>
#include <rclcpp/rclcpp.hpp>
#include <std_msgs/msg/string.hpp>
#include <std_srvs/srv/trigger.hpp>
#include <string>

#include <mars/session.hpp>

class MarsNode : public rclcpp::Node {
    using Text = std_msgs::msg::String;
    using Trigger = std_srvs::srv::Trigger;

  public:
    MarsNode() : Node("mars"), session_(mars::Session::open(declare_parameter<std::string>("bundle"))) {
        declare_parameter<double>("tau", -1.0);
        text_ = create_publisher<Text>("~/text", 100);
        // An answer takes seconds, so it has a callback group of its own and the other callbacks run meanwhile.
        answers_ = create_callback_group(rclcpp::CallbackGroupType::MutuallyExclusive);
        rclcpp::SubscriptionOptions options;
        options.callback_group = answers_;
        prompts_ = create_subscription<Text>("~/prompt", 10, [this](Text::ConstSharedPtr prompt) { answer(prompt->data); }, options);
        stop_ = create_service<Trigger>("~/stop", [this](Trigger::Request::SharedPtr, Trigger::Response::SharedPtr response) {
            // Not in answer(), because a long prompt takes seconds before its first event.
            if (const auto stream = std::atomic_load(&stream_)) stream->cancel();
            response->success = true;
        });
    }

  private:
    void answer(const std::string& prompt) {
        try {
            const auto stream = std::make_shared<mars::Stream>(session_.stream({{"user", prompt}}));
            std::atomic_store(&stream_, stream);
            while (const auto event = stream->next()) {
                if (!rclcpp::ok()) stream->cancel();
                const double tau = get_parameter("tau").as_double();
                tau < 0 ? stream->set_exact(true) : stream->set_tau(tau);
                Text piece;
                piece.data = event->text;
                if (!piece.data.empty()) text_->publish(piece);
            }
        } catch (const mars::Error& error) { // such as a prompt that is too long, or a failed device
            RCLCPP_ERROR(get_logger(), "%s", error.what());
        }
    }

    mars::Session session_;
    std::shared_ptr<mars::Stream> stream_; // the last answer's stream; any thread may cancel it
    rclcpp::Publisher<Text>::SharedPtr text_;
    rclcpp::CallbackGroup::SharedPtr answers_;
    rclcpp::Subscription<Text>::SharedPtr prompts_;
    rclcpp::Service<Trigger>::SharedPtr stop_;
};

int main(int argc, char** argv) {
    rclcpp::init(argc, argv);
    const auto node = std::make_shared<MarsNode>();
    rclcpp::executors::MultiThreadedExecutor executor;
    executor.add_node(node);
    executor.spin();
    rclcpp::shutdown();
}
